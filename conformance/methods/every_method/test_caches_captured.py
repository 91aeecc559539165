"""Decode steps within `captured`: the bits of plain steps, for every cache, and for whatever happens between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.methods.support.tiny_models import prompts
from kvtwin.optimized import hf
from kvtwin.optimized.hf import _host, captured
from kvtwin.reference.thinkv import Thresholds

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.usefixtures("graphs"), pytest.mark.whole]

LONG = {"max_tokens": 400}
THINKV = {"budget": 12, "tau": 4, "group": 2, "block": 4, **LONG}
SYNCKV = {"k": 3, "stride": 4, **LONG}
PMKVQ = {"bits": 5, "window": 4, "group": 8, **LONG}
#: Options of every cache with schedules of a few steps, by a name for each.
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "longflow": ("LongFlow", {"budget": 6}),
    "longflow-per-head": ("LongFlow", {"budget": 6, "per_head": True, "protect_newest": True}),
    "thinkv": ("ThinKV", {**THINKV, "thresholds": Thresholds(layers=(0, 1), edges=(0.4, 0.6))}),
    "thinkv-one-thought": ("ThinKV", THINKV),
    "synckv": ("SyncKV", {**SYNCKV, "union_clusters": True}),
    "synckv-spread": ("SyncKV", {**SYNCKV, "spread": True, "exclude_static": True}),
    "synckv-offload": ("SyncKV", {**SYNCKV, "clusters": 1, "offload": True}),
    "epikv": ("EpiKV", {"budget": 12, "layers": ((0,), (1,)), "window": 4, "recent": 2}),
    "epikv-lag-kv": ("EpiKV", {"budget": 12, "policy": "lag_kv", "recent": 2}),
    "kivi": ("KIVI", {"group": 4, "value_bits": 4, "residual": 8, **LONG}),
    "pm-kvq": ("PMKVQ", PMKVQ),
    "pm-kvq-by-layer": ("PMKVQ", {**PMKVQ, "bits": [5, 6]}),
    "quest": ("Quest", {"budget": 8, "page_size": 4, "skip_layers": 1, **LONG}),
    "cake": ("CAKE", {"budget": 5, "window": 2}),
    **{
        f"{pair.name}-{name.replace(' ', '-')}": (pair.state.__name__.removesuffix("State"), options)
        for pair in discovery.built_in() if pair.state is not None
        for name, options in (checkers.ask(pair.name, "CACHES", None) or {}).items()
    },
}
#: One set of options for each cache.
FIRST = list({kind: name for name, (kind, _) in reversed(CACHES.items())}.values())
for _kind, _ in CACHES.values():
    getattr(hf, f"{_kind}Cache")                # imports its module: see `graphs`
#: Names that the host counts for itself.
SCHEDULE = {"may_replay", "reset_last"}


def make(name: str, model: Any, side: Any = hf) -> Any:
    kind, options = CACHES[name]
    return getattr(side, f"{kind}Cache")(model if kind == "EpiKV" else model.config, **options)


def generated(model: Any, cache: Any, inputs: dict[str, Tensor], new: int, **options: Any) -> tuple[Tensor, ...]:
    """The tokens, and the logits of each step."""
    found = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=new, return_dict_in_generate=True, output_logits=True,
        **{"do_sample": False, **options},
    )
    return found.sequences, *found.logits


def assert_equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    assert len(one) == len(other)
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert_same(mine, theirs, what=f"logits of step {step}" if step else "tokens")


def assert_same_caches(cache: Any, plain: Any) -> None:
    """Equal tokens in equal slots, and equal numbers on the host."""
    for mine, other in zip(cache.layers, plain.layers, strict=True):
        for name in ("positions", "occupied", "tokens_seen"):
            assert_same(*(torch.as_tensor(getattr(layer.state, name)) for layer in (mine, other)), what=name)
    for mine, other in zip(_host.parts(cache), _host.parts(plain), strict=True):
        assert type(mine) is type(other)
        for name, value in vars(mine).items():
            if isinstance(value, (int, str)) and name not in SCHEDULE:
                assert value == vars(other)[name], f"{type(mine).__name__}.{name}"


def check(name: str, model: Any, inputs: dict[str, Tensor], *lengths: int) -> None:
    """Prompts of one cache that generate so many tokens. The graphs of the first prompt serve the others, too."""
    cache, plain = make(name, model), make(name, model)
    expected = []
    for turn, new in enumerate(lengths):
        expected.append(generated(model, plain, shifted(inputs, turn), new))
        plain.reset() if turn + 1 < len(lengths) else None
    # The first step of each kind has no graph. ThinKV has a kind for steps that begin a segment.
    first = 2 if "thresholds" in CACHES[name][1] else 1
    with captured(model) as steps:
        for turn, new in enumerate(lengths):
            replays = steps.replays
            assert_equal(generated(model, cache, shifted(inputs, turn), new), expected[turn])
            again = CACHES[name][0] == "CAKE"                   # a prompt decides how long its buffers are
            without = first if turn == 0 or again else 0
            assert (steps.reasons, steps.replays - replays) == ([], new - 1 - without), turn
            assert steps.graphs == first
            # What the cache frees now must not come back at the same place, as it would by chance.
            held = [value for one in _host.parts(cache) for value in _host.flat(vars(one).values())]
            cache.reset() if turn + 1 < len(lengths) else None
        assert held
    assert_same_caches(cache, plain)


def shifted(inputs: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    """Other tokens in the same places."""
    return {**inputs, "input_ids": inputs["input_ids"].roll(by, 0) + by * inputs["attention_mask"]}


@pytest.mark.parametrize("name", [
    # Where steps are slow, the others only run if all tests do.
    name if name in FIRST else pytest.param(name, marks=pytest.mark.slow_on_cpu) for name in CACHES
])
def test_captured_steps_have_the_bits_of_plain_steps(name, model, device):
    on_a_gpu = (330, 12) if name in FIRST else (40, 12)
    check(name, model, prompts(9, [0, 2], device), *((14, 6) if device.type == "cpu" else on_a_gpu))


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_many_captured_steps_have_the_bits_of_plain_steps(name, model, device):
    check(name, model, prompts(9, [0], device), 330)
