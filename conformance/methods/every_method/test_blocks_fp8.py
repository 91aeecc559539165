"""`attend` over FP8 keys and values with scales: as over the numbers that they stand for:
what only our own sides promise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.fp8_cases import FORMATS, LARGEST, Fp8AttendCase, exact, fp8_attend_cases
from kvtwin.conformance.cases.strategies import DTYPES
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.test_blocks_fp8 import ATTENDS, attend_of, block, each_function, each_side

each_method = pytest.mark.parametrize("pair", ATTENDS, ids=str)
each_format = pytest.mark.parametrize("fp8", FORMATS)
few = settings(max_examples=max(2, settings().max_examples // 5))


def assert_right(pair: discovery.Pair, twins: Any, side: str, case: Fp8AttendCase) -> Any:
    """Judge the result of `attend`, and return it."""
    judge, results = checkers.checker_of(pair.name), []
    assert judge is not None

    class Module:
        @staticmethod
        def attend(**inputs: Any) -> Any:
            results.append(attend_of(pair, twins, side)(**inputs))
            return results[0]

    assert list(judge.replay(case, Module)) == ["attend: right"]
    return results[0]


def assert_all_same(one: Any, other: Any, what: str = "") -> None:
    for name, mine, theirs in zip(one._fields, one, other, strict=True):
        assert_same(mine, theirs, what=f"{name} {what}")


@each_format
def test_the_scales_of_this_file_differ(fp8):
    """From each other, and among heads, by more than a factor of 4. And some queries are padding."""
    case = block(ATTENDS[0], fp8, torch.device("cpu"))
    for one, other in ((case.key_scale, case.value_scale), *((scale[:1], scale[1:]) for scale in (
        case.key_scale, case.value_scale
    ))):
        assert bool(((one / other).log2().abs() > 2).all())
    assert bool((case.valid.sum(-1) > 1).all() and (~case.valid).any())


@pytest.mark.kind("equivalence")
@each_method
@each_side
@given(data=st.data())
@few
def test_attend_over_fp8_is_what_float64_says(pair, side, data, twins):
    assert_right(pair, twins, side, data.draw(fp8_attend_cases(pair.name, slots=(1, 24))))


@pytest.mark.kind("equivalence")
@each_function
@each_side
@pytest.mark.parametrize(("fp8", "scales"), [
    ("e4m3", "heads"), ("e4m3", "tensor_and_none"), ("e4m3", "none_and_heads"), ("e5m2", "heads_and_tensor"),
    ("e5m2", "tensor"), ("e5m2", "none"),
])
def test_attend_applies_scales_where_they_matter(pair, side, fp8, scales, twins, device):
    """To logits and outputs. The scales of keys and values, and of heads, differ by orders of magnitude. With an odd
    number of tiles, programs share the slots."""
    slots = {"e4m3": 37, "e5m2": 24}[fp8]
    assert_right(pair, twins, side, block(pair, fp8, device, scales=scales, slots=slots, per_head="and" in scales))


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_function
@each_side
@pytest.mark.parametrize(("group", "head_dim", "dtype", "queries", "slots", "fp8"), [
    (1, 80, torch.float32, 1, 33, "e5m2"), (5, 160, torch.float16, 3, 19, "e4m3"),
    (8, 16, torch.bfloat16, 17, 17, "e4m3"),
], ids=str)
def test_attend_over_fp8_of_every_shape(pair, side, group, head_dim, dtype, queries, slots, fp8, twins, device):
    """Group and head sizes that are not powers of two, a single query, and a block of all slots."""
    assert_right(pair, twins, side, block(
        pair, fp8, device, batch=1, group=group, head_dim=head_dim, dtype=dtype, queries=queries, slots=slots,
        per_head=True, occupancy="random" if slots > queries else "full",
    ))


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_function
@each_side
@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_attend_reads_every_code_of_keys_and_values(pair, side, fp8, dtype, twins, device):
    """Slot i has the finite code i in one channel of its key, and in all channels of its value."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F <= LARGEST[fp8]], dtype=torch.uint8)
    key = torch.zeros(1, 1, len(codes), 16, dtype=torch.uint8)
    key[0, 0, :, 0] = codes
    value = codes[None, None, :, None].expand_as(key).contiguous()
    query = torch.zeros(1, 1, 1, 16, dtype=dtype)
    query[..., 0] = 1
    largest = torch.finfo(FORMATS[fp8]).max
    for most in (0.5, 40.0):  # all weights similar, and a few large ones
        assert_right(pair, twins, side, Fp8AttendCase.of(
            query.to(device), *(bits.to(device).view(FORMATS[fp8]) for bits in (key, value)), method=pair.name,
            scale=1.0, key_scale=torch.tensor(most / largest, device=device),
        ))


@pytest.mark.kind("equivalence")
@each_function
@each_side
@each_format
def test_attend_returns_the_one_value_that_it_holds(pair, side, fp8, twins, device):
    """A single token has the weight 1, so that its value, with any finite codes, is the output without any error but
    the product with the scale of its head, and its rounding."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F <= LARGEST[fp8]], dtype=torch.uint8)
    value = codes[:240].view(1, 2, 1, 120).to(device).view(FORMATS[fp8])
    key = torch.ones(1, 2, 1, 120, device=device).to(FORMATS[fp8])
    occupied = torch.ones(1, 1, dtype=torch.bool, device=device)
    scale = torch.tensor([0.3, 1.7e-3], device=device)
    for dtype in DTYPES:
        query = torch.ones(1, 4, 1, 120, device=device, dtype=dtype)
        output, received = attend_of(pair, twins, side)(query, key, value, occupied, value_scale=scale)
        expected = (value.float() * scale[:, None, None]).to(dtype).repeat_interleave(2, 1)
        assert_same(output + 0.0, expected + 0.0, what=f"output in {dtype}")
        assert received.tolist() == [[[1.0], [1.0]]]


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_function
@each_side
@each_format
def test_attend_over_fp8_with_powers_of_two_has_the_bits_of_other_numbers(pair, side, fp8, twins, device):
    """Codes times powers of two are bfloat16 numbers, too. On a GPU, where other instructions load them, the results
    are right, and need not have the same bits."""
    scale = {"e4m3": 2.0**-8, "e5m2": 2.0**-15}[fp8]
    made = block(pair, fp8, device, dtype=torch.bfloat16, content="codes", scales="none", scale=scale, poison="zero")
    scales = {"key_scale": torch.tensor([0.5, 0.25], device=device), "value_scale": torch.tensor(0.25, device=device)}
    case = Fp8AttendCase.of(
        made.query, made.key, made.value, made.occupied, method=pair.name, scale=made.scale, **scales
    )
    found = assert_right(pair, twins, side, case)
    plain = {name: exact(getattr(case, name), scales[f"{name}_scale"]).bfloat16() for name in ("key", "value")}
    if device.type == "cpu":
        assert_all_same(found, attend_of(pair, twins, side)(case.query, **plain, occupied=case.occupied, scale=scale))


@pytest.mark.kind("equivalence")
@each_function
@each_format
def test_the_reference_of_attend_is_exact_in_float64(pair, fp8, twins, device):
    """With a float64 query: as over the exact numbers."""
    case = block(pair, fp8, device)
    attend, query = attend_of(pair, twins, "reference"), {"query": case.query.double()}
    assert_all_same(attend(**case.inputs | query), attend(**case.exact_inputs | query))


@pytest.mark.kind("laws")
@each_function
@each_side
def test_missing_and_equal_scales_of_attend(pair, side, twins, device):
    """A missing scale is a scale of one. One scale is the same scale for every head."""
    attend, ones = attend_of(pair, twins, side), torch.ones(2, device=device)
    case = block(pair, "e4m3", device, scales="none", batch=1, queries=2)
    plain = attend(**case.inputs)
    for scales in ({"key_scale": ones, "value_scale": ones[0]}, {"value_scale": ones}):
        assert_all_same(attend(**case.inputs, **scales), plain, f"with {scales}")
    inputs = block(pair, "e5m2", device, scales="tensor", batch=1, queries=2).inputs
    many = {name: inputs[name].expand(2) for name in ("key_scale", "value_scale")}
    assert many["key_scale"].stride() == (0,)
    assert_all_same(attend(**inputs | many), attend(**inputs), "with strides of zero")


@pytest.mark.kind("laws")
@each_function
@each_side
def test_a_head_does_not_depend_on_the_scales_or_tokens_of_others(pair, side, twins, device):
    """Nor on those of another row."""
    attend, inputs = attend_of(pair, twins, side), block(pair, "e5m2", device).inputs
    factor = torch.tensor([1.0, 5.0], device=device)
    other = {name: inputs[name] * factor for name in ("key_scale", "value_scale")}
    one, changed = attend(**inputs), attend(**inputs | other)
    assert_same(changed.output[:, :3], one.output[:, :3], what="output of the first head")
    assert_same(changed.received[:, 0], one.received[:, 0], what="received by the first head")
    assert bool((changed.output[:, 3:] != one.output[:, 3:]).any())
    moved = {}
    for name in ("key", "value"):
        bits = inputs[name].view(torch.uint8).clone()
        bits[1] = 0x7B - bits[1] % 3 * 40
        moved[name] = bits.view(inputs[name].dtype)
    for name, mine, its in zip(one._fields, one, attend(**inputs | moved), strict=True):
        assert_same(its[0], mine[0], what=f"{name} of the first row")


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_function
@each_side
@each_format
@pytest.mark.parametrize("occupancy", ["random", "left_padding", "empty_row"])
def test_attend_reads_no_code_of_a_free_slot(pair, side, fp8, occupancy, twins, device):
    """NaN with both signs, infinity, and all others."""
    case = block(pair, fp8, device, occupancy=occupancy, poison="zero")
    attend, inputs = attend_of(pair, twins, side), case.inputs
    plain = attend(**inputs)
    free = ~case.occupied[:, None, :, None]
    assert bool(free.any())
    for code in (0x7C, 0x7F, 0xFF, 0xFC, 0x80, LARGEST[fp8]):
        poisoned = {
            name: inputs[name].view(torch.uint8).masked_fill(free, code).view(FORMATS[fp8]) for name in ("key", "value")
        }
        assert_all_same(attend(**inputs | poisoned), plain, f"with {code:#x} in free slots")


@pytest.mark.kind("laws")
@each_function
@each_side
@each_format
def test_attend_reads_no_nan_of_a_free_slot(pair, side, fp8, twins, device):
    case = block(pair, fp8, device, queries=1, occupancy="empty_row")
    found = assert_right(pair, twins, side, case)
    assert_all_same(attend_of(pair, twins, side)(**replace(case, poison="zero").inputs), found, "with zeros")


@pytest.mark.kind("laws")
@each_function
@each_side
@each_format
def test_equal_keys_of_fp8_receive_the_same(pair, side, fp8, twins, device):
    """In full tiles, in tiles with free slots, and in the last one."""
    case = block(pair, fp8, device, content="identical", queries=1, slots=40)
    received = assert_right(pair, twins, side, case).received
    for row, occupied in zip(received, case.occupied, strict=True):
        assert_same(row[:, occupied], row[:, occupied][:, :1].expand(-1, int(occupied.sum())), what="received")


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_function
@each_side
@each_format
@pytest.mark.parametrize("layout", ["transposed", "sliced", "apart", "spread", "channels_first"])
def test_attend_over_fp8_does_not_depend_on_strides(pair, side, fp8, layout, twins, device):
    """Those of keys, of values, and of their scales. On a GPU, other instructions may load the tokens."""
    found = assert_right(pair, twins, side, block(pair, fp8, device, layout=layout))
    if device.type == "cpu":
        plain = block(pair, fp8, device, layout="contiguous")
        assert_all_same(found, attend_of(pair, twins, side)(**plain.inputs))


@pytest.mark.kind("laws")
@each_function
@each_side
def test_attend_over_fp8_with_strides_and_a_negative_scale(pair, side, twins, device):
    """Of scales, too; and another scale of the softmax is multiplied with that of keys."""
    assert_right(pair, twins, side, block(pair, "e4m3", device, layout="spread", scale=-0.25))


@pytest.mark.kind("laws")
@each_function
@each_side
@pytest.mark.parametrize(("fp8", "code"), [("e4m3", 0xFF), ("e5m2", 0x7E)])
def test_nan_in_an_occupied_slot_reaches_the_output_of_attend(pair, side, fp8, code, twins, device):
    case = block(pair, fp8, device, occupancy="full", queries=1)
    for name in ("key", "value"):
        bits = getattr(case, name).view(torch.uint8).clone()
        bits[1, 0, 20, 3] = code
        output, _ = attend_of(pair, twins, side)(**case.inputs | {name: bits.view(FORMATS[fp8])})
        assert bool(output[1, :3, 0, 3].isnan().all())
        assert not bool(output[0].isnan().any()) and not bool(output[1, 3:].isnan().any())


@pytest.mark.limits
@each_function
def test_what_kernels_cannot_take_is_refused_by_attend_with_fp8(pair, twins, device):
    case = block(pair, "e4m3", device)
    attend = attend_of(pair, twins, "optimized")
    with pytest.raises(TypeError, match="query.dtype must be one of torch.float32, torch.float16, torch.bfloat16, got"):
        attend(**case.inputs | {"query": case.query.double()})
    with pytest.raises(ValueError, match="value_scale requires grad"):
        attend(**case.inputs | {"value_scale": case.value_scale.clone().requires_grad_()})
