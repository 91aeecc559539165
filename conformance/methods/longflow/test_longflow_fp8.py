"""LongFlow over FP8 keys and values with scales: as over the numbers that they stand for:
what only our own sides promise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.fp8_cases import FORMATS, LARGEST, Fp8Case, exact, fp8_cases
from kvtwin.conformance.cases.paged_states import OWN_LAYOUTS
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.longflow.test_longflow_fp8 import (
    each_dtype,
    each_format,
    each_nan,
    each_side,
    function,
    of_nan,
    over_pages,
    step,
)

few = settings(max_examples=max(2, settings().max_examples // 5))


@pytest.mark.kind("equivalence")
@each_side
@given(data=st.data())
def test_longflow_decodes_fp8_as_float64_would(side, data, twins):
    case = data.draw(fp8_cases())
    judge.assert_decode_right(function(twins, side)(**case.inputs), case)


@each_format
def test_the_scales_of_this_file_differ(fp8, device):
    """From each other, and among heads, by more than a factor of 4."""
    case = step(fp8, torch.device("cpu"))
    for one, other in ((case.key_scale, case.value_scale), *((scale[:1], scale[1:]) for scale in (
        case.key_scale, case.value_scale
    ))):
        assert bool(((one / other).log2().abs() > 2).all())


def assert_all_same(one: Any, other: Any, what: str = "") -> None:
    for name, mine, theirs in zip(one._fields, one, other, strict=True):
        assert_same(mine, theirs, what=f"{name} {what}")


@pytest.mark.kind("equivalence")
@each_side
@each_format
@each_dtype
def test_longflow_returns_the_one_value_that_it_holds(side, fp8, dtype, twins, device):
    """A single token has the weight 1, so that its value, with any finite codes, is the output without any error but
    the product with the scale, and its rounding. With all heads' scales, too."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F <= LARGEST[fp8]], dtype=torch.uint8)
    value = codes[:240].view(1, 2, 1, 120).to(device).view(FORMATS[fp8])
    key = torch.ones(1, 2, 1, 120, device=device).to(FORMATS[fp8])
    query = torch.ones(1, 4, 120, device=device, dtype=dtype)
    occupied = torch.ones(1, 1, dtype=torch.bool, device=device)
    scale = torch.tensor([0.3, 1.7e-3], device=device)
    output = function(twins, side)(query, key, value, occupied, value_scale=scale).output
    expected = (value.float() * scale[:, None, None]).to(dtype)[:, :, 0].repeat_interleave(2, 1)
    assert_same(output + 0.0, expected + 0.0, what="output")


@pytest.mark.kind("laws")
@each_side
@each_format
@each_dtype
def test_longflow_over_fp8_with_powers_of_two_has_the_bits_of_other_numbers(side, fp8, dtype, twins, device):
    """Codes times powers of two are float16 and bfloat16 numbers, too. On a GPU, where other instructions load them,
    the results are right, and need not have the same bits."""
    scale = {"e4m3": 2.0**-8, "e5m2": 2.0**-15}[fp8]
    made = step(fp8, device, dtype=dtype, content="codes", scales="none", scale=scale)
    scales = {"key_scale": torch.tensor([0.5, 0.25], device=device), "value_scale": torch.tensor(0.25, device=device)}
    case = Fp8Case.of(made.query, made.key, made.value, made.occupied, scale=made.scale, **scales)
    decode = function(twins, side)
    found = decode(**case.inputs)
    judge.assert_decode_right(found, case)
    plain = {}
    for name in ("key", "value"):
        held = torch.where(case.occupied[:, None, :, None], exact(getattr(case, name), scales[f"{name}_scale"]), 0.0)
        plain[name] = held.to(dtype)
        assert_same(plain[name].double(), held, what=f"{name} in {dtype}")
    if device.type == "cpu":
        assert_all_same(found, decode(case.query, **plain, occupied=case.occupied, scale=case.scale))


@pytest.mark.kind("equivalence")
@each_format
def test_the_reference_is_exact_in_float64(fp8, twins, device):
    """With a float64 query: as over the exact numbers."""
    case = step(fp8, device)
    decode, inputs = function(twins, "reference"), case.inputs
    found = decode(**inputs | {"query": case.query.double()})
    assert_all_same(found, decode(**case.exact_inputs | {"query": case.query.double()}))


@pytest.mark.kind("laws")
@each_side
@each_format
def test_missing_scales_are_scales_of_one(side, fp8, twins, device):
    case = step(fp8, device, scales="none")
    decode, ones = function(twins, side), torch.ones(2, device=device)
    plain = decode(**case.inputs)
    for scales in (
        {"key_scale": ones}, {"value_scale": ones}, {"key_scale": ones, "value_scale": ones[0]},
        {"key_scale": ones[0], "value_scale": ones},
    ):
        assert_all_same(decode(**case.inputs, **scales), plain, f"with {scales}")


@pytest.mark.kind("laws")
@each_side
@each_format
def test_one_scale_is_the_same_scale_for_every_head(side, fp8, twins, device):
    case = step(fp8, device, scales="tensor")
    decode, inputs = function(twins, side), case.inputs
    many = {name: inputs[name].expand(2) for name in ("key_scale", "value_scale")}
    assert many["key_scale"].stride() == (0,)
    assert_all_same(decode(**inputs | many), decode(**inputs))


@pytest.mark.kind("laws")
@each_side
@each_format
def test_a_head_does_not_depend_on_the_scales_of_another(side, fp8, twins, device):
    case = step(fp8, device, per_head=True)
    decode, inputs = function(twins, side), case.inputs
    other = {name: inputs[name] * torch.tensor([1.0, 5.0], device=device) for name in ("key_scale", "value_scale")}
    one, changed = decode(**inputs), decode(**inputs | other)
    assert_same(changed.output[:, :3], one.output[:, :3], what="output of the first head")
    assert_same(changed.score[:, 0], one.score[:, 0], what="score of the first head")
    assert_same(changed.slot[:, 0], one.slot[:, 0], what="slot of the first head")
    assert bool((changed.output[:, 3:] != one.output[:, 3:]).any())


@pytest.mark.kind("laws")
@each_side
@each_format
def test_a_row_does_not_depend_on_another(side, fp8, twins, device):
    case = step(fp8, device)
    decode, inputs = function(twins, side), case.inputs
    changed = dict(inputs)
    for name in ("key", "value"):
        bits = inputs[name].view(torch.uint8).clone()
        bits[1] = 0x7F - bits[1] % 3 * 40
        changed[name] = bits.view(FORMATS[fp8])
    for name, one, other in zip(("output", "score", "slot"), decode(**inputs), decode(**changed), strict=True):
        assert_same(one[0], other[0], what=f"{name} of the first row")


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
@each_format
@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("occupancy", ["random", "left_padding", "empty_row"])
def test_no_code_in_a_free_slot_has_an_effect(side, fp8, occupancy, head_dim, twins, device):
    """NaN with both signs, infinity, and all others."""
    case = step(fp8, device, occupancy=occupancy, poison="zero", head_dim=head_dim)
    decode, inputs = function(twins, side), case.inputs
    plain = decode(**inputs)
    free = ~case.occupied[:, None, :, None]
    assert bool(free.any())
    for code in (0x7C, 0x7F, 0xFF, 0xFC, 0x80, LARGEST[fp8]):
        poisoned = {
            name: inputs[name].view(torch.uint8).masked_fill(free, code).view(FORMATS[fp8]) for name in ("key", "value")
        }
        assert_all_same(decode(**inputs | poisoned, check_finite=True), plain, f"with {code:#x} in free slots")


@pytest.mark.kind("laws")
@each_side
@each_format
def test_equal_tokens_tie_wherever_they_lie(side, fp8, twins, device):
    """In full tiles, in tiles with free slots, and in the last one; the lowest is next, with and without scales."""
    for occupancy, scales in (("full", "heads"), ("random", "none"), ("full", "tensor")):
        case = step(fp8, device, content="identical", occupancy=occupancy, scales=scales, slots=40)
        inputs = case.inputs
        found = function(twins, side)(**inputs)
        judge.assert_decode_right(found, case)
        if occupancy == "full":
            for open_ in ([6, 21, 39], [38, 39], [15, 16]):
                protected = ~torch.isin(torch.arange(40, device=device), torch.tensor(open_, device=device))
                found = function(twins, side)(**inputs | {"protected": protected.expand(2, -1)})
                assert found.slot.tolist() == open_[:1] * 2


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
@each_format
@pytest.mark.parametrize("layout", ["transposed", "sliced", "spread", "channels_first", "apart", "mixed", "far"])
def test_longflow_over_fp8_does_not_depend_on_strides(side, fp8, layout, twins, device):
    """Those of keys, of values, and of their scales. On a GPU, other instructions may load the tokens."""
    one, other = (step(fp8, device, layout=name) for name in ("contiguous", layout))
    found = function(twins, side)(**other.inputs)
    judge.assert_decode_right(found, other)
    if device.type == "cpu":
        assert_all_same(found, function(twins, side)(**one.inputs))


@pytest.mark.kind("laws")
@each_side
def test_another_scale_of_the_softmax_is_folded_into_that_of_keys(side, twins, device):
    case = step("e4m3", device, scale=-0.25)
    judge.assert_decode_right(function(twins, side)(**case.inputs), case)


@pytest.mark.kind("laws")
@each_side
@given(data=st.data())
@few
def test_longflow_over_pages_of_fp8_has_the_bits_of_one_tensor(side, data, twins, device):
    """And is right, in every layout of the pages, with slots of each KV head, too."""
    case = data.draw(fp8_cases(layout=("contiguous",)))
    layout = data.draw(st.sampled_from(OWN_LAYOUTS))
    found = function(twins, side, "paged_decode_attention")(**over_pages(case, layout))
    judge.assert_decode_right(found, case)
    if device.type == "cpu":
        assert_all_same(found, function(twins, side)(**case.inputs))


@pytest.mark.kind("laws")  # which slot scores of NaN choose is not fixed for others
@each_side
@each_nan
def test_nan_in_an_occupied_slot_leaves_the_slot_in_range(side, fp8, code, twins, device):
    assert all(0 <= int(found.slot[1]) < 37 for found in of_nan(twins, side, fp8, code, device))


@pytest.mark.kind("laws")
@each_side
def test_infinite_values_reach_the_output(side, twins, device):
    case = step("e5m2", device, occupancy="full")
    bits = case.value.view(torch.uint8).clone()
    bits[1, 0, 20, 3], bits[1, 1, 20, 4] = 0x7C, 0xFC
    output = function(twins, side)(**case.inputs | {"value": bits.view(torch.float8_e5m2)}).output
    assert bool((output[1, :3, 3] == torch.inf).all()) and bool((output[1, 3:, 4] == -torch.inf).all())


@pytest.mark.limits
def test_outputs_beyond_float16(twins, device):
    """The kernel saturates, since rounded weights must not turn a finite mean into infinity."""
    key = torch.full((1, 1, 3, 16), 57344.0, device=device).to(torch.float8_e5m2)
    inputs = {
        "query": torch.zeros(1, 1, 16, dtype=torch.float16, device=device), "key": key, "value": key,
        "occupied": torch.ones(1, 3, dtype=torch.bool, device=device), "value_scale": torch.tensor(2.0, device=device),
    }
    for side, expected in (("reference", torch.inf), ("optimized", 65504.0)):
        assert function(twins, side)(**inputs).output.unique().tolist() == [expected]


@pytest.mark.limits
def test_what_kernels_cannot_take_is_refused_with_fp8(twins, device):
    case = step("e4m3", device)
    decode = function(twins, "optimized")
    with pytest.raises(TypeError, match="query.dtype must be one of torch.float32, torch.float16, torch.bfloat16, got"):
        decode(**case.inputs | {"query": case.query.double()})
    with pytest.raises(ValueError, match="value_scale requires grad"):
        decode(**case.inputs | {"value_scale": case.value_scale.clone().requires_grad_()})
