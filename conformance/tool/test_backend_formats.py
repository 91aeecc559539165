"""The properties of Triton's arithmetic that the quantizing kernels rely on, and each of their device functions, pinned
on each backend. test_backend.py tests the rounding of float32 to other types.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtwin.conformance.cases import format_oracle as oracle
from kvtwin.optimized._common.launch import INTERPRETED, fp8_format
from kvtwin.optimized._common.numerics import divided, from_fp8, root, without_sign_of_zero
from kvtwin.optimized.thinkv._formats_kernels import (
    decode,
    decode_e4m3,
    decode_scale,
    encode,
    encode_e4m3,
    fp8_scale,
    magnitude,
    scale_code,
)

BLOCK = 1 << 17 if INTERPRETED else 1024
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
LARGEST = torch.finfo(torch.float32).max


def patterns(low_halves: list[int]) -> Tensor:
    """All upper halves of a float32 with each of these lower halves."""
    bits = ((torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16) | torch.tensor(low_halves)).flatten()
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    """Assert bitwise equality. -0 and +0 differ, and all NaNs are equal."""
    assert torch.equal(actual.isnan(), expected.isnan())
    wrong = ~expected.isnan() & (actual.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32))
    assert not wrong.any(), f"{actual[wrong][:4].tolist()}, expected {expected[wrong][:4].tolist()}"


@triton.jit
def _map(x, out, n, FUNCTION: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < n, other=0)
    if FORMAT is None:
        tl.store(out + i, FUNCTION(y), mask=i < n)
    else:
        tl.store(out + i, FUNCTION(y, FORMAT), mask=i < n)


def mapped(function: Any, x: Tensor, device: torch.device, dtype: torch.dtype, fmt: str | None = None) -> Tensor:
    """function(x), computed elementwise in a kernel and copied to the CPU."""
    out = torch.empty(x.shape, dtype=dtype, device=device)
    _map[(triton.cdiv(x.numel(), BLOCK),)](x.to(device), out, x.numel(), FUNCTION=function, FORMAT=fmt, BLOCK=BLOCK)
    return out.cpu()


# Arithmetic ----------------------------------------------------------------------------------------------------------


@triton.jit
def _divide(a, b, out, n, OURS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(a + i, mask=i < n, other=0.0), tl.load(b + i, mask=i < n, other=1.0)
    tl.store(out + i, divided(x, y) if OURS else tl.div_rn(x, y), mask=i < n)


@pytest.mark.parametrize("ours", [False, True], ids=["div_rn", "divided"])
@pytest.mark.parametrize(
    ("low", "high", "by"),
    [((-149, 127), (-149, 127), "any"), ((-149, -100), (-149, -100), "any"), ((-149, -120), (0, 20), "any"),
     ((-149, 127), (8, 9), "448"), ((-149, 127), (11, 12), "2688"), ((-149, 127), (2, 3), "6")],
    ids=["all", "subnormal denominators", "subnormal quotients", "448", "2688", "6"],
)  # fmt: skip
def test_division_keeps_subnormal_numbers(low, high, by, ours, device):
    """Neither operands nor results are flushed to zero."""
    generator = torch.Generator().manual_seed(7)
    a, b = (
        ((1 + torch.rand(1 << 15, generator=generator, dtype=torch.float64))
         * 2.0 ** (ends[0] + (ends[1] - ends[0]) * torch.rand(1 << 15, generator=generator).double()).floor()).float()
        for ends in (low, high)
    )  # fmt: skip
    if by != "any":
        b = torch.full_like(b, float(by))
    out = torch.empty_like(a, device=device)
    _divide[(triton.cdiv(a.numel(), BLOCK),)](a.to(device), b.to(device), out, a.numel(), OURS=ours, BLOCK=BLOCK)
    assert_bits(out.cpu(), a / b)
    # The expected results, by exact arithmetic.
    for x, y, quotient in zip(a[:200].tolist(), b[:200].tolist(), (a / b)[:200].tolist(), strict=True):
        exact = oracle.Fraction(x) / oracle.Fraction(y)
        assert exact > oracle.LARGEST or oracle.Fraction(quotient) == oracle.float32(exact)


@triton.jit
def _special(a, b, quotients, roots, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(quotients + i, divided(tl.load(a + i), tl.load(b + i)))
    tl.store(roots + i, root(tl.load(a + i)))


def test_quotients_and_roots_of_special_numbers(device):
    ends = [0.0, 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 1.0, oracle.LARGEST, float("inf"), float("nan")]
    numbers = torch.tensor([sign * float(one) for one in ends for sign in (1.0, -1.0)])
    a, b = (one.flatten().contiguous() for one in torch.meshgrid(numbers, numbers, indexing="ij"))
    quotients, roots = torch.empty_like(a, device=device), torch.empty_like(a, device=device)
    _special[(1,)](a.to(device), b.to(device), quotients, roots, BLOCK=a.numel())
    for found, expected in ((quotients.cpu(), a / b), (roots.cpu(), a.sqrt())):
        assert torch.equal(found.isnan(), expected.isnan())
        assert_bits(found.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@triton.jit
def _root(a, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, root(tl.load(a + i, mask=i < n, other=0.0)), mask=i < n)


@pytest.mark.parametrize(("low", "high"), [(-149, -120), (-149, 127), (0, 2)])
def test_roots_are_rounded_correctly(low, high, device):
    generator = torch.Generator().manual_seed(9)
    exponent = torch.randint(low, high, (1 << 15,), generator=generator)
    a = ((1 + torch.rand(1 << 15, generator=generator, dtype=torch.float64)) * exponent.double().exp2()).float()
    # Roots that are nearest to halfway between two float32.
    a[:4] = torch.tensor([4 - 2.0**-22, 4 - 2.0**-21, 1 + 2.0**-23, 1 + 2.0**-22])
    out = torch.empty_like(a, device=device)
    _root[(triton.cdiv(a.numel(), BLOCK),)](a.to(device), out, a.numel(), BLOCK=BLOCK)
    assert_bits(out.cpu(), a.double().sqrt().float())  # double rounding is harmless: 53 >= 2 * 24 + 2


@triton.jit
def _scaled(x, factor, out, UNSIGNED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    y = tl.load(x + i) * tl.load(factor)
    tl.store(out + i, without_sign_of_zero(y) if UNSIGNED else y)


@pytest.mark.parametrize("unsigned", (False, True))
def test_products_keep_subnormal_numbers_and_the_sign_of_zero(unsigned, device):
    """The sign of zero is kept unless it is removed on purpose."""
    x = torch.tensor([2.0**-149, -(2.0**-130), 3 * 2.0**-149, -0.0, 0.0, 1.5, -(2.0**-100), 2.0**-126], device=device)
    for factor in (1.0, 2.0**120, 2.0**-20, -1.0, 1 / 3):
        out = torch.empty_like(x)
        _scaled[(1,)](x, torch.tensor([factor], device=device), out, UNSIGNED=unsigned, BLOCK=8)
        expected = x.cpu() * factor
        assert_bits(out.cpu(), torch.where(expected == 0, 0.0, expected) if unsigned else expected)


@triton.jit
def _most(x, out, BLOCK: tl.constexpr):
    y = tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_max(out, tl.max(y, 0).to(tl.int32, bitcast=True))


def test_the_largest_of_all_programs(device):
    """The bits of positive floats have the order of integers."""
    x = torch.rand(8, 16, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-100, 100, 25)[:, None]
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _most[(8,)](x[[3, 1, 7, 2, 0, 6, 4, 5]].to(device), out, BLOCK=16)
    assert out.cpu().view(torch.float32).item() == x.max().item()


# Device functions ----------------------------------------------------------------------------------------------------


def test_magnitude(device):
    x = patterns([0, 1, 0x8000, 0xFFFF])
    assert_bits(mapped(magnitude, x, device, torch.float32), x.abs().nan_to_num(nan=0.0, posinf=LARGEST))


def test_encode_e4m3_is_torchs_cast(device):
    """For numbers up to 448. Midpoints between codes end in zero bits, and are tested with both neighbours."""
    x = patterns([0, 1, 0x8000, 0xFFFF])
    x = x[(x >= 0) & ~x.signbit()]
    codes = mapped(encode_e4m3, x, device, torch.int32)
    # torch's cast of numbers beyond 448 differs between versions.
    expected = x.clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    wrong = codes != expected
    assert not wrong.any(), f"{x[wrong][:4].tolist()} -> {codes[wrong][:4].tolist()}, {expected[wrong][:4].tolist()}"
    assert codes.max() == 126 and codes[x == math.inf].tolist() == [126]


def test_encode_e4m3_on_halves_typed(device):
    x = torch.tensor([1.0625, 1.1875, 2**-10, 3 * 2**-10, 2**-6 - 2**-10, 432.0, 464.0, 465.0])
    assert mapped(encode_e4m3, x, device, torch.int32).tolist() == [56, 58, 0, 2, 8, 126, 126, 126]


def test_every_e4m3_code_decodes(device):
    codes = torch.arange(256, dtype=torch.int32)
    expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert_bits(mapped(decode_e4m3, codes, device, torch.float32), expected)
    assert_bits(mapped(decode_scale, codes[:127], device, torch.float32), expected[:127])
    assert expected[:127].double().tolist() == [float(value) for value in oracle.E4M3]


@triton.jit
def _from_fp8(codes, out, FORMAT: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, from_fp8(tl.load(codes + i), out.dtype.element_ty, FORMAT))


def fp8_number(code: int, exponent_bits: int) -> float:
    """The number of an FP8 code by the definition of its format: E5M2 as in IEEE 754, E4M3 without infinity."""
    mantissa_bits = 7 - exponent_bits
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    bias, top = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits - 1
    if exponent_bits == 4 and code & 0x7F == 0x7F:
        return math.nan
    if exponent_bits == 5 and exponent == top:
        return math.nan if mantissa else math.copysign(math.inf, -(code >> 7) + 0.5)
    number = mantissa * 2.0 ** (1 - bias) if exponent == 0 else (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias)
    return math.copysign(number * 2.0**-mantissa_bits, -(code >> 7) + 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("fp8", "exponent_bits"), [(torch.float8_e4m3fn, 4), (torch.float8_e5m2, 5)], ids=str)
def test_every_fp8_code_converts_exactly(fp8, exponent_bits, dtype, device):
    """In kernels, by integer arithmetic and by the GPU's instruction, and in torch, which the reference uses."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = torch.tensor([fp8_number(code, exponent_bits) for code in range(256)], dtype=torch.float64).float()
    for kind in {fp8_format(fp8, device), str(fp8).removeprefix("torch.float8_").removesuffix("fn")}:
        out = torch.empty(256, dtype=dtype, device=device)
        _from_fp8[(1,)](codes.to(device), out, FORMAT=kind)
        assert_bits(out.cpu().float(), expected)
    assert_bits(codes.to(device).view(fp8).to(dtype).cpu().float(), expected)
    assert_bits(codes.to(device).view(fp8).double().cpu().float(), expected)


@pytest.mark.parametrize("fmt", ["nvfp4", "ternary", "int4", "int2"])
def test_every_code_of_a_format_decodes(fmt, device):
    half = 1 << oracle.BITS[fmt] - 1
    values = mapped(decode, torch.arange(2 * half, dtype=torch.int32), device, torch.float32, fmt)
    magnitudes = [float(value) for value in oracle.MAGNITUDES[fmt]]
    assert values.tolist() == magnitudes + [-value for value in magnitudes]


@pytest.mark.parametrize("fmt", ["nvfp4", "ternary", "int4", "int2"])
def test_scale_code(fmt, device):
    x = patterns([0, 1, 0xFFFF])
    x = x[(x >= 0) & x.isfinite() & ~x.signbit()]
    largest = float(oracle.MAGNITUDES[fmt][-1])
    expected = (x / largest).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(mapped(scale_code, x, device, torch.int32, fmt), expected.int())


def test_fp8_scale(device):
    x = patterns([0, 1, 0xFFFF])
    x = x[(x >= 0) & x.isfinite() & ~x.signbit()]
    assert_bits(mapped(fp8_scale, x, device, torch.float32), x / 448)


@triton.jit
def _encode(x, scale, out, FORMAT: tl.constexpr, DIVIDES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = tl.load(x + row[:, None] * BLOCK + i[None, :])
    tl.store(out + row[:, None] * BLOCK + i[None, :], encode(y, tl.load(scale + row)[:, None], FORMAT, DIVIDES))


@pytest.mark.parametrize("fmt", ["nvfp4", "ternary", "int4", "int2"])
def test_comparing_is_dividing_exactly(fmt, device):
    """`encode` compares with multiples of the scale. Division followed by comparison gives the same codes, even if the
    quotient is rounded. For all scales, multiples at and around every midpoint, and NaN, infinity and zeros."""
    values = oracle.MAGNITUDES[fmt]
    ends = torch.tensor([float(half) for half in oracle.midpoints(values)])
    scales = torch.tensor([float(scale) for scale in oracle.E4M3] + [0.0])[:, None]
    x = scales * ends
    for _ in range(2):
        x = torch.cat((torch.nextafter(x, torch.zeros(())), x, torch.nextafter(x, torch.tensor(math.inf))), 1)
    x = torch.cat((x, -x, torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 2**-149, LARGEST]).expand(128, 7)), 1)
    x = torch.nn.functional.pad(x, (0, triton.next_power_of_2(x.shape[1]) - x.shape[1]))
    ratio = torch.where(scales > 0, x.abs().nan_to_num(nan=0.0, posinf=LARGEST) / scales, 0.0)
    below, reached = (torch.bucketize(ratio, ends, right=right) for right in (False, True))
    index = torch.where(below % 2 == 0, below, reached)
    expected = torch.where((x < 0) & (index > 0), index + (1 << oracle.BITS[fmt] - 1), index)
    for divides in (False, True) if fmt == "nvfp4" else (False,):
        out = torch.empty(x.shape, dtype=torch.int32, device=device)
        rows = 128 if INTERPRETED else 4
        _encode[(128 // rows,)](x.to(device), scales.to(device), out, FORMAT=fmt, DIVIDES=divides, ROWS=rows,
                                BLOCK=x.shape[1])  # fmt: skip
        assert torch.equal(out.cpu().long(), expected)
