"""ThinKV's number formats: the twins agree bitwise, and agree with exact rational arithmetic.

The reference is compared with format_oracle.py, which uses neither torch nor float32, except where the semantics
require it. The optimized side is compared with the reference: on all codes and scales, on all midpoints and their
neighbours, and on drawn tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvtwin.conformance.cases import format_oracle as oracle
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.format_cases import DTYPES, FORMATS, FormatCase, format_cases
from kvtwin.conformance.judge.compare import fail
from kvtwin.reference.contract.thinkv.types import Quantized

SCALES = oracle.E4M3[1:]
every_format = pytest.mark.parametrize("fmt", FORMATS)
sides = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(4), settings().max_examples // 2))


def bits_of(x: Tensor) -> Tensor:
    """The bits of x. All NaNs are equal, and +0 and -0 differ."""
    if not x.is_floating_point():
        return x
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return bits.masked_fill(x.isnan(), -1)


def assert_codes(actual: Tensor, expected: list[list[int]]) -> None:
    """Not an assertion on lists: where the variable CI is set, pytest compares all of two lists, and long ones take it
    minutes."""
    assert_same_bits(actual.cpu().long(), torch.tensor(expected), "codes")


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        fail(f"{what}: expected {expected.dtype} {tuple(expected.shape)}, got {actual.dtype} {tuple(actual.shape)}")
    wrong = bits_of(actual) != bits_of(expected)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        fail(f"{what}: {int(wrong.sum())} of {wrong.numel()} differ; at {at} expected {expected[at]}, got {actual[at]}")


def assert_same_quantized(actual: Quantized, expected: Quantized) -> None:
    assert_same_bits(actual.scales, expected.scales, "scales")
    assert_same_bits(actual.codes, expected.codes, "codes")
    for name in ("fmt", "axis", "group", "shape"):
        assert getattr(actual, name) == getattr(expected, name)
    assert (actual.tensor_scale is None) == (expected.tensor_scale is None)
    if expected.tensor_scale is not None:
        assert_same_bits(actual.tensor_scale, expected.tensor_scale, "tensor_scale")


# Drawn tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@given(case=format_cases())
def test_quantized_alike_and_read_alike(case, twins, device):
    """For drawn tensors with contents that are difficult for a format."""
    reference, optimized = twins.reference.thinkv, twins.optimized.thinkv
    x = case.x(device)
    expected = reference.quantize(x, **case.options)
    actual = optimized.quantize(x, **case.options)
    assert_same_quantized(actual, expected)
    dtype = case.dtype
    assert_same_bits(optimized.dequantize(actual, dtype), reference.dequantize(expected, dtype), f"{dtype}")


@given(case=format_cases(formats=FORMATS, most=12))
@few
def test_the_reference_does_what_exact_arithmetic_says(case, twins):
    x = case.x().float()
    q = twins.reference.thinkv.quantize(case.x(), **case.options)
    second = oracle.tensor_scale(x.flatten().tolist()) if case.tensor_scale else None
    assert (q.tensor_scale is None) == (second is None)
    assert second is None or Fraction(q.tensor_scale.item()) == second
    back = twins.reference.thinkv.dequantize(q, torch.float32)
    for where, scale in groups_of(q):
        group = oracle.quantize(x[where].flatten().tolist(), case.fmt, case.scale_rule or "amax", second)
        assert Fraction(number(scale)) == group.scale
        assert q.codes[where].flatten().tolist() == group.codes
        exact = [oracle.float32(abs(value)) * (-1 if value < 0 else 1) for value in group.values(case.fmt)]
        assert [Fraction(value) for value in back[where].flatten().tolist()] == exact
    assert not (back.signbit() & (back == 0)).any()


def groups_of(q: Quantized) -> Iterator[tuple[Any, Tensor]]:
    """(index into the tensor, scale) of every group."""
    for place in product(*map(range, q.scales.shape)):
        lead = place[:len(q.shape) - 2]
        if q.fmt == "fp8":
            start = place[-1] * q.group
            where = (*lead, slice(start, start + q.group))
        elif q.axis == -2:
            start = place[-2] * q.group
            where = (*lead, slice(start, start + q.group), place[-1])
        else:
            start = place[-1] * q.group
            where = (*lead, place[-2], slice(start, start + q.group))
        yield where, q.scales[place]


def number(scale: Tensor) -> float:
    """The value of a scale's bits, by torch's decoding of E4M3."""
    return (scale.view(torch.float8_e4m3fn) if scale.dtype == torch.uint8 else scale).float().item()


# Exhaustive tests ----------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(fmt, dtype, twins, device):
    """All 256 codes with all 256 scales, including those that `quantize` never produces. All values are exact, except
    for fp8 scales with many bits."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).expand(256, 256)
    scales = codes.mT[:, :1]
    if fmt == "fp8":
        scales = torch.cat([
            torch.tensor([0, 2**-149, 2**-126, 1 / 3, 1, 448, 3.4e38, float("inf"), float("nan")], device=device),
            torch.exp2(torch.linspace(-140, 120, 247, device=device)),
        ])
    q = Quantized(codes, scales, fmt, -1, 1 if fmt == "fp8" else 256, codes.shape)
    expected = twins.reference.thinkv.dequantize(q, dtype)
    assert_same_bits(twins.optimized.thinkv.dequantize(q, dtype), expected, f"{fmt} as {dtype}")
    if fmt == "fp8":
        value = codes.contiguous().view(torch.float8_e4m3fn).float() * scales[:, None]
    else:
        value = scales.contiguous().view(torch.float8_e4m3fn).float() * decoded(codes, fmt)
    assert_same_bits(expected, (value + 0.0).to(dtype), f"{fmt} as {dtype}, by torch's cast")


def decoded(codes: Tensor, fmt: str) -> Tensor:
    half = 1 << oracle.BITS[fmt] - 1
    values = torch.tensor([float(value) for value in oracle.MAGNITUDES[fmt]], device=codes.device)
    return values[(codes % half).long()] * torch.where((codes // half) % 2 == 1, -1, 1)


def neighbours(values: list[Fraction]) -> Tensor:
    """The numbers, which must be float32 numbers, their neighbours below and above, and the negatives of all."""
    x = torch.tensor([float(value) for value in values])
    assert [Fraction(value) for value in x.tolist()] == values, "expected float32 numbers"
    near = torch.cat((x, torch.nextafter(x, torch.zeros(())), torch.nextafter(x, torch.tensor(torch.inf))))
    return torch.cat((near, -near))


@pytest.mark.property("accuracy")
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "fp8"])
@sides
def test_every_midpoint_under_every_scale(fmt, side, twins, device):
    """Midpoints between two magnitudes, and the numbers one ulp away, round to nearest, with ties to the even code.

    The first element of a group is the largest magnitude times the scale, so that the group gets exactly this scale.
    """
    values, halves = oracle.MAGNITUDES[fmt], oracle.midpoints(oracle.MAGNITUDES[fmt])
    tops = torch.tensor([[float(values[-1] * scale)] for scale in SCALES])
    x = torch.cat((tops, torch.stack([neighbours([half * scale for half in halves]) for scale in SCALES])), 1)
    q = getattr(twins, side).thinkv.quantize(x.to(device), fmt, axis=-1, group=x.shape[1])
    assert q.scales.flatten().tolist() == list(range(1, 127))
    expected = [oracle.quantize(row, fmt) for row in x[::25].tolist()]
    assert_codes(q.codes[::25], [group.codes for group in expected])
    # A number of few bits, so that all scales give the same decision.
    ratios = len(halves)
    tied = [index + index % 2 for index in range(ratios)]
    row = [len(values) - 1, *tied, *range(ratios), *range(1, ratios + 1)]
    half = 1 << oracle.BITS[fmt] - 1
    row += [index | half if index else 0 for index in row[1:]]
    assert_codes(q.codes, [row] * len(SCALES))


@pytest.mark.property("accuracy")
@sides
def test_every_midpoint_of_fp8(side, twins, device):
    """With powers of two as scales, for which torch's cast gives the same codes. With scales of more bits, the quotient
    must be rounded correctly to distinguish a midpoint from its neighbours."""
    halves = [*oracle.midpoints(oracle.E4M3), *oracle.E4M3[1:-1]]
    scales = [Fraction(2) ** exponent for exponent in (-100, 0, 100)] + [Fraction(n, 512) for n in (9, 13, 15, 30011)]
    tops = torch.tensor([[float(448 * scale)] for scale in scales])
    x = torch.cat((tops, torch.stack([neighbours([half * scale for half in halves]) for scale in scales])), 1)
    q = getattr(twins, side).thinkv.quantize(x.to(device), "fp8", axis=-2, group=1)
    assert q.scales.tolist() == [float(scale) for scale in scales]
    assert_codes(q.codes, [oracle.quantize(row, "fp8").codes for row in x.tolist()])
    # The largest element has the quotient 1, so no scale is rounded.
    codes = x[1].clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes[codes == 128] = 0  # zeros have no sign
    for row in q.codes.cpu()[:3]:
        assert torch.equal(row, codes)


@pytest.mark.property("accuracy")
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "fp8"])
@sides
def test_every_scale_and_every_midpoint_between_scales(fmt, side, twins, device):
    """Groups of one element, whose scale is amax / largest in E4M3. It saturates from 448 on, and is 0 up to 2^-10."""
    largest = oracle.MAGNITUDES[fmt][-1]
    x = neighbours([value * largest for value in (*oracle.midpoints(oracle.E4M3), *SCALES)])
    beyond = torch.tensor([0.0, -0.0, 2**-149, -(2**-126), 2**-40, 500 * float(largest), 1e30, 3.4e38])
    x = torch.cat((x, beyond))[:, None]
    q = getattr(twins, side).thinkv.quantize(x.to(device), fmt, axis=-1, group=1)
    expected = [oracle.quantize(row, fmt) for row in x.tolist()]
    scales = q.scales.cpu().view(torch.float8_e4m3fn).double().flatten()
    assert_same_bits(scales, torch.tensor([float(group.scale) for group in expected], dtype=torch.float64), "scales")
    assert_codes(q.codes, [group.codes for group in expected])


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("size", (1, 3, 4, 16, 37, 128))
def test_packing_round_trips(bits, size, twins, device):
    """Codes are packed from the lowest bits, with zeros after the last code. Bits that belong to no code are
    dropped."""
    codes = torch.randint(256, (2, 3, size), generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    for view in (codes.to(device), codes.to(device).mT.contiguous().mT):
        expected = twins.reference.thinkv.pack(view, bits)
        assert_same_bits(twins.optimized.thinkv.pack(view, bits), expected, "packed")
        for side in (twins.reference, twins.optimized):
            back = side.thinkv.unpack(expected, bits, size)
            assert_same_bits(back.cpu(), codes & (1 << bits) - 1, "unpacked")
    for row, packed in zip(codes.flatten(0, 1).tolist(), expected.flatten(0, 1).tolist(), strict=True):
        whole = sum((code % (1 << bits)) << (bits * place) for place, code in enumerate(row))
        assert packed == list(whole.to_bytes(-(-size * bits // 8), "little"))


@pytest.mark.property("accuracy")
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_unpacking_reads_every_byte(bits, twins, device):
    packed = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    for side in (twins.reference, twins.optimized):
        codes = side.thinkv.unpack(packed, bits, 8 // bits)
        assert_same_bits(side.thinkv.pack(codes, bits), packed, "packed again")
        places = torch.arange(0, 8, bits, device=device)
        assert torch.equal(codes.long(), (packed.long() >> places) % (1 << bits))


def test_drawn_cases_are_made_again_from_their_repr():
    case = FormatCase(leading=(2,), tokens=5, channels=17, fmt="int4", content="special", dtype=torch.float16, seed=3)
    assert_same_bits(eval(repr(case)).x(), case.x(), "x")
