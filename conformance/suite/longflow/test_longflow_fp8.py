"""LongFlow over FP8 keys and values with scales: as over the numbers that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.fp8_cases import FORMATS, LARGEST, Fp8Case
from kvtwin.conformance.cases.fp8_errors import BAD_CALLS, BAD_ELEMENTS, changed
from kvtwin.conformance.cases.paged_states import OWN_LAYOUTS, filled_pages
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.cases.strategies import DTYPES
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.refusals import NotProvided
from kvtwin.reference.contract import Pages

SIDES = ("optimized", "reference")
each_side = pytest.mark.parametrize("side", SIDES)
each_format = pytest.mark.parametrize("fp8", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def function(twins: Any, side: str, name: str = "decode_attention") -> Callable[..., Any]:
    longflow = getattr(twins, side).longflow
    found: Callable[..., Any] = getattr(longflow, name)
    if "key_scale" not in inspect.signature(found).parameters:
        raise NotProvided(f"{longflow}.{name}: key_scale")
    return found


def step(fp8: str, device: torch.device, **more: Any) -> Fp8Case:
    """Two rows, two KV heads, several tiles, free slots, and scales that differ per head. head_dim is a power of two
    in one of the formats."""
    sizes = {"batch": 2, "key_value_heads": 2, "group": 3, "slots": 37, "occupancy": "random"}
    sizes["head_dim"] = {"e4m3": 24, "e5m2": 32}[fp8]
    return Fp8Case(**{**sizes, "fp8": fp8, "device": device.type, **more})


@pytest.mark.property("accuracy")
@pytest.mark.kind("equivalence")
@each_side
@each_format
@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
@pytest.mark.parametrize("scales", ["none", "tensor", "heads", "heads_and_tensor", "tensor_and_none"])
def test_longflow_applies_scales_where_they_matter(side, fp8, per_head, scales, twins, device):
    """To logits, outputs and scores. The scales of keys and values, and of heads, differ by orders of magnitude."""
    case = step(fp8, device, per_head=per_head, scales=scales)
    judge.assert_decode_right(function(twins, side)(**case.inputs), case)


@pytest.mark.property("accuracy")
@pytest.mark.kind("equivalence")
@each_side
@each_format
@each_dtype
def test_longflow_reads_every_code_of_keys_and_values(side, fp8, dtype, twins, device):
    """Slot i has the finite code i in one channel of its key, and in all channels of its value."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F <= LARGEST[fp8]], dtype=torch.uint8)
    key = torch.zeros(1, 1, len(codes), 16, dtype=torch.uint8)
    key[0, 0, :, 0] = codes
    value = codes[None, None, :, None].expand_as(key).contiguous()
    query = torch.zeros(1, 1, 16, dtype=dtype)
    query[..., 0] = 1
    largest = torch.finfo(FORMATS[fp8]).max
    for most in (0.5, 40.0):  # all weights similar, and a few large ones
        case = Fp8Case.of(
            query.to(device), *(bits.to(device).view(FORMATS[fp8]) for bits in (key, value)),
            scale=1.0, key_scale=torch.tensor(most / largest, device=device),
        )
        judge.assert_decode_right(function(twins, side)(**case.inputs), case)


def over_pages(case: Fp8Case, layout: PagedLayout) -> dict[str, Any]:
    """The arguments of `paged_decode_attention`. All memory without a token holds NaN."""
    others = {name: value for name, value in case.inputs.items() if name not in ("key", "value")}
    return {**others, "pages": filled_pages(layout, case.key, case.value)}


@pytest.mark.property("layouts")
@pytest.mark.kind("laws")
@each_side
@each_format
def test_pages_of_64_slots_hold_whole_tiles_of_fp8(side, fp8, twins, device):
    case = step(fp8, device, slots=150, occupancy="left_padding")
    for layout in OWN_LAYOUTS:
        found = function(twins, side, "paged_decode_attention")(**over_pages(case, layout))
        judge.assert_decode_right(found, case)


# Numbers that are not finite, and wrong arguments --------------------------------------------------------------------


each_nan = pytest.mark.parametrize(("fp8", "code"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7E), ("e5m2", 0xFD)])


def of_nan(twins: Any, side: str, fp8: str, code: int, device: torch.device) -> Any:
    """The results for NaN in a key, and for NaN in a value, of the second row's first head."""
    inputs = step(fp8, device, occupancy="full").inputs
    for name in ("key", "value"):
        bits = inputs[name].view(torch.uint8).clone()
        bits[1, 0, 20, 3] = code
        yield function(twins, side)(**inputs | {name: bits.view(FORMATS[fp8])})


@pytest.mark.property("extreme_numbers")
@pytest.mark.kind("laws")
@each_side
@each_nan
def test_nan_in_an_occupied_slot_reaches_the_output(side, fp8, code, twins, device):
    for found in of_nan(twins, side, fp8, code, device):
        assert bool(found.output[1, :3, 3].isnan().all())
        assert not bool(found.output[0].isnan().any()) and not bool(found.output[1, 3:].isnan().any())


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize(("fp8", "code"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7C), ("e5m2", 0xFE)])
@pytest.mark.parametrize("paged", [False, True], ids=["one_tensor", "pages"])
def test_codes_that_are_not_finite_are_refused_in_occupied_slots_alone(side, fp8, code, paged, twins, device):
    case = step(fp8, device, occupancy="one_free", poison="nan")
    layout = OWN_LAYOUTS[0]

    def call(key: torch.Tensor, value: torch.Tensor) -> None:
        inputs = {**case.inputs, "key": key, "value": value}
        if paged:
            pages = filled_pages(layout, key, value)
            inputs = over_pages(case, layout) | {"pages": pages}
            function(twins, side, "paged_decode_attention")(**inputs, check_finite=True)
        else:
            function(twins, side)(**inputs, check_finite=True)

    try:
        call(case.key, case.value)
    except ValueError as error:
        raise AssertionError("NaN in a free slot is refused") from error
    slot = int(case.occupied[1].nonzero()[0])
    for name in ("key", "value"):
        bits = getattr(case, name).view(torch.uint8).clone()
        bits[1, 0, slot, 3] = code
        tensors = {"key": case.key, "value": case.value, name: bits.view(FORMATS[fp8])}
        with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
            call(**tensors)


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize("paged", [False, True], ids=["one_tensor", "pages"])
@pytest.mark.parametrize(
    ("changes", "error", "says"), (BAD_CALLS | BAD_ELEMENTS).values(), ids=[*BAD_CALLS, *BAD_ELEMENTS]
)
def test_wrong_fp8_is_refused(side, changes, error, says, paged, twins, device):
    """Elements of scales on a GPU are checked with check_finite alone."""
    inputs = changed(step("e4m3", device, occupancy="full", content="largest").inputs, changes)
    decode = function(twins, side, "paged_decode_attention" if paged else "decode_attention")
    if paged:
        key, value = inputs.pop("key"), inputs.pop("value")
        # One page of all slots per row.
        table = torch.arange(2, dtype=torch.int32, device=device)[:, None]
        inputs["pages"] = Pages(key.transpose(1, 2), value.transpose(1, 2), table)
    with pytest.raises(error, match=says):
        decode(**inputs, check_finite=True)
