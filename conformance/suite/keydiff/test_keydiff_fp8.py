"""KeyDiff over FP8 keys: as over the numbers that they are, and as over these numbers times positive scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.fp8_cases import FORMATS, LARGEST
from kvtwin.conformance.cases.in_pages import PagedKeyCase, with_pages
from kvtwin.conformance.cases.key_cases import ANCHORS, KeyCase
from kvtwin.conformance.harness.impl import Facade
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.refusals import NotProvided
from kvtwin.reference.contract import Pages

each_side = pytest.mark.parametrize("side", ("optimized", "reference"))
each_format = pytest.mark.parametrize("fp8", FORMATS)


def keys(fp8: str, device: torch.device, **more: Any) -> KeyCase:
    """Two rows, two KV heads, two tiles, free slots. head_dim is a power of two in one of the formats."""
    sizes = {"batch": 2, "key_value_heads": 2, "slots": 24, "budget": 9, "occupancy": "random", "per_head": True}
    sizes["head_dim"] = {"e4m3": 24, "e5m2": 32}[fp8]
    return KeyCase(**{**sizes, "dtype": FORMATS[fp8], "device": str(device), "seed": 1, **more})


def module_of(twins: Any, side: str, device: torch.device) -> Any:
    """KeyDiff of one side. NotProvided if another implementation takes no FP8 keys."""
    one = getattr(twins, side)
    if isinstance(one, Facade):
        try:
            one.keydiff.score(torch.ones(1, 1, 16, 16, device=device).to(torch.float8_e4m3fn))
        except TypeError as error:
            raise NotProvided(f"{one.keydiff}: FP8 keys") from error
    return one.keydiff


def over_pages(twins: Any, side: str, case: PagedKeyCase) -> Any:
    """The same, if it takes FP8 keys in pages."""
    one = getattr(twins, side)
    if isinstance(one, Facade):
        try:
            one.keydiff.paged_score(**with_pages(case.paged_score_inputs))
        except TypeError as error:
            raise NotProvided(f"{one.keydiff}: FP8 pages") from error
    return one.keydiff


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def assert_right(module: Any, case: KeyCase) -> None:
    judge.assert_score_right(module.score(**case.score_inputs), case)
    judge.assert_evict_right(module.evict(**case.inputs), case)


@pytest.mark.property("accuracy")
@pytest.mark.kind("equivalence")
@each_side
@each_format
@pytest.mark.parametrize("anchor", ANCHORS)
def test_keydiff_over_fp8_with_every_anchor(side, fp8, anchor, twins, device):
    assert_right(module_of(twins, side, device), keys(fp8, device, anchor=anchor, recent=2, protect="random"))


@pytest.mark.property("accuracy")
@pytest.mark.kind("equivalence")
@each_side
@each_format
def test_keydiff_reads_every_code_of_keys(side, fp8, twins, device):
    """Slot i has the finite code i in one channel of its key, and 1 in another."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F <= LARGEST[fp8]], dtype=torch.uint8, device=device)
    key = torch.zeros(1, 1, len(codes), 16, device=device).to(FORMATS[fp8])
    key[..., 3] = torch.ones((), device=device).to(FORMATS[fp8])
    bits(key)[0, 0, :, 0] = codes
    module, case = module_of(twins, side, device), KeyCase.of(key, budget=100)
    assert_right(module, case)
    judge.assert_pairwise_right(module.pairwise_score(**case.pairwise_inputs), case)


@pytest.mark.property("decisions")
@pytest.mark.kind("equivalence")
@each_side
@each_format
def test_kept_keys_and_values_have_the_same_codes(side, fp8, twins, device):
    """NaN and the sign of zero included, in values. Places without a token hold zeros."""
    case = keys(fp8, device, budget=20)
    value = torch.arange(256, device=device).to(torch.uint8).repeat(48 * case.head_dim * 2 // 256 + 1)
    value = value[:case.key.numel()].view(case.key.shape).view(FORMATS[fp8])
    result = module_of(twins, side, device).evict(**case.inputs | {"value": value})
    assert result.key.dtype == result.value.dtype == FORMATS[fp8]
    index = result.kept.clamp_min(0)[..., None].expand(-1, -1, -1, case.head_dim)
    for name, tensor, source in (("key", result.key, case.key), ("value", result.value, value)):
        expected = bits(source).gather(2, index).masked_fill(result.kept[..., None] < 0, 0)
        assert_same(bits(tensor), expected, what=f"codes of the kept {name}")
    assert bool((result.kept < 0).any()) and bool((result.kept >= 0).any())


@pytest.mark.property("ties")
@pytest.mark.kind("laws")
@each_side
@each_format
def test_equal_keys_of_fp8_are_evicted_from_the_lowest(side, fp8, twins, device):
    for content, occupancy in (("equal_keys", "random"), ("duplicates", "none"), ("zero_keys", "random")):
        case = keys(fp8, device, content=content, occupancy=occupancy, batch=1)
        judge.assert_evict_right(module_of(twins, side, device).evict(**case.inputs), case)


# Wrong arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_similarities_that_depend_on_the_scale_are_refused(side, similarity, twins, device):
    case = keys("e4m3", device, similarity=similarity)
    module = module_of(twins, side, device)
    says = f"similarity must be 'cosine' for keys of torch.float8_e4m3fn, whose scale others .*, got '{similarity}'"
    for call, inputs in ((module.score, case.score_inputs), (module.evict, case.inputs)):
        with pytest.raises(ValueError, match=says):
            call(**inputs)


@pytest.mark.kind("bad_input")
@each_side
def test_keydiff_refuses_wrong_fp8(side, twins, device):
    """The fnuz types, FP8 keys or values alone or of different types, and a scale, which no function takes."""
    case, module = keys("e4m3", device), module_of(twins, side, device)
    inputs = case.inputs
    for fnuz in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        wrong = {name: inputs[name].view(fnuz) for name in ("key", "value")}
        for call, changed in (
            (module.evict, inputs | wrong), (module.score, case.score_inputs | {"key": wrong["key"]}),
            (module.pairwise_score, {"key": wrong["key"]}),
        ):
            with pytest.raises(TypeError, match=f"key.dtype must be one of .*torch.float8_e5m2, got {fnuz}"):
                call(**changed)
    for name, other, says in (
        ("value", inputs["value"].view(torch.float8_e5m2), "float8_e4m3fn, got torch.float8_e5m2"),
        ("value", inputs["value"].float(), "float8_e4m3fn, got torch.float32"),
        ("key", inputs["key"].float(), "float32, got torch.float8_e4m3fn"),
    ):
        with pytest.raises(TypeError, match=f"value must have key's dtype torch.{says}"):
            module.evict(**inputs | {name: other})
    with pytest.raises(TypeError, match="key_scale"):
        module.score(case.key, key_scale=torch.tensor(0.5, device=device))


# In pages ------------------------------------------------------------------------------------------------------------


def paged_keys(fp8: str, device: torch.device, **more: Any) -> PagedKeyCase:
    """Those of `keys` in pages: several of them, the last one partial, and NaN in all other memory."""
    plain = keys(fp8, device, slots=27, **more)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return PagedKeyCase(**{**fields, "layout": "contiguous"}, page_size=4)


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_similarities_that_depend_on_the_scale_are_refused_over_pages(side, similarity, twins, device):
    case = paged_keys("e4m3", device)
    module, inputs = over_pages(twins, side, case), with_pages(case.paged_score_inputs)
    with pytest.raises(ValueError, match="similarity must be 'cosine'"):
        module.paged_score(**inputs | {"similarity": similarity})
    with pytest.raises(ValueError, match="similarity must be 'cosine'"):
        module.paged_evict(**inputs | {"similarity": similarity, "budget": 4})


@pytest.mark.kind("bad_input")
@each_side
def test_other_fp8_is_refused_over_pages(side, twins, device):
    case = paged_keys("e4m3", device)
    inputs = with_pages(case.paged_score_inputs)
    key, value, table = inputs["pages"]
    for pages, says in (
        (Pages(*(one.view(torch.uint8).view(torch.float8_e4m3fnuz) for one in (key, value)), table), "must be one of"),
        (Pages(key, value.view(torch.uint8).view(torch.float8_e5m2), table), "must have key_cache's dtype"),
    ):
        with pytest.raises(TypeError, match=says):
            over_pages(twins, side, case).paged_score(**inputs | {"pages": pages})
