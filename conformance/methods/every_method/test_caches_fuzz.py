"""Wrong arguments of the caches for transformers, see `cases.fuzz_caches`. The profile sets how many."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import fuzz
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.discovery import Pair
from kvtwin.conformance.methods.support import fuzz_caches

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.whole]

PAIRS = [pair for pair in discovery.built_in() if pair.state is not None]
SIDES = ("reference", "optimized")
some = settings(max_examples=max(at_least(4), settings().max_examples // 2))


@pytest.mark.limits
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@given(data=st.data())
@some
def test_wrong_arguments_of_a_cache_are_refused_or_harmless(
    pair: Pair, side: str, device: torch.device, data: st.DataObject
) -> None:
    target = data.draw(st.sampled_from(fuzz_caches.targets(pair, side)))
    fuzz.check(target, fuzz.wrong(target, data, device), device)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_numbers_of_rows_must_be_a_tensor_of_integers(pair: Pair, side: str, device: torch.device) -> None:
    """Fractions were once cut off. Whether the cache holds tokens makes no difference."""
    wrong: list[tuple[object, str]] = [
        (None, "NoneType"), ("text", "str"), (0, "int"), ([0, 1], "list"), (torch.tensor([1.6, 0.2]), "torch.float32"),
        (torch.tensor([True, False]), "torch.bool"), (torch.tensor(1), "0 dimensions"),
    ]
    for target in fuzz_caches.targets(pair, side)[1:]:
        change, _, (name, *_) = target.make(device)
        for index, says in wrong if name != "repeats" else ():
            with pytest.raises((TypeError, ValueError), match=f"^{name} must .*{says}"):
                change(index)


@pytest.mark.parametrize(("index", "says"), [
    (torch.tensor([0, 1, 0]), r"= \(2,\), got \(3,\)"), (torch.tensor([0, 2]), "rows 0 to 1"),
    (torch.tensor([-1, 0]), "rows 0 to 1"),
])
def test_rows_of_beams_must_be_those_of_the_cache(index: torch.Tensor, says: str, device: torch.device) -> None:
    reorder, cache, _ = fuzz_caches.targets(PAIRS[0], "reference")[1].make(device)
    before = fuzz.contents(cache)
    with pytest.raises(ValueError, match=f"^beam_idx must .*{says}"):
        reorder(index.to(device))
    assert fuzz.contents(cache) == before


def test_a_policy_of_another_type_is_refused_by_name(device: torch.device) -> None:
    pair = next(pair for pair in PAIRS if pair.name == "epikv")
    for side in SIDES:
        make, _, good = fuzz_caches.targets(pair, side)[0].make(device)
        with pytest.raises(TypeError, match="^policy must be"):
            make(**{**good, "policy": []})
