"""PM-KVQ: shrinking rounds to the nearest code, loses nothing against quantizing once, and stays within its budget."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.reference.baselines.pm_kvq import PMKVQConfig, dequantize, quantize

pytestmark = pytest.mark.kind("claims")

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])
HALVINGS = (16, 8, 4)


def every_code(bits: int, device: torch.device) -> Tensor:
    """[1, 1, 1, 2^bits]"""
    return torch.arange(2**bits, dtype=torch.int32, device=device).view(1, 1, 1, -1)


def nearest(code: int, divisor: int) -> int:
    """code / divisor, rounded to nearest. No ties: the divisor is odd."""
    assert divisor % 2
    return (2 * code + divisor) // (2 * divisor)


def formula(code: Tensor, n: int, *, half: int = 0, factor: int = 0) -> Tensor:
    """The authors' shift, with changed numbers."""
    return product(code.long() + half, n, factor) >> 3 * n


def product(code: Any, n: int, factor: int = 0) -> Any:
    """What the authors' shift shifts to the right."""
    return (code + 2 ** (n - 1)) * (2 ** (2 * n) - 2**n + 1 + factor)


@pytest.mark.claim("PM-1a")
@both_sides
@pytest.mark.parametrize("bits", HALVINGS)
def test_every_code_shrinks_to_the_nearest(bits, side, twins, device):
    """All 65,536, 256 and 16 codes. With another offset or factor, the shift is wrong for some code."""
    n, codes = bits // 2, every_code(bits, device)
    expected = [nearest(code, 2**n + 1) for code in range(2**bits)]
    scale = torch.full((1, 1, 1, 1), 0.75, device=device)
    found = getattr(twins, side).baselines.pm_kvq.shrink(codes, scale, bits=bits)
    assert found.codes.flatten().tolist() == expected
    assert found.scale.item() == 0.75 * (2**n + 1)
    assert (min(expected), max(expected)) == (0, 2**n - 1)
    for change in ({"half": 1}, {"half": -1}, {"factor": -1}):
        assert formula(codes, n, **change).flatten().tolist() != expected
    assert (codes // 2**n).flatten().tolist() != expected, "the upper half of the bits is another rounding"


@pytest.mark.claim("PM-1b")
@pytest.mark.parametrize("bits", HALVINGS)
def test_the_shift_fits_in_32_bits_without_a_sign(bits):
    """But not in 32 bits with one, for 16 bits."""
    n = bits // 2
    largest = product(2**bits - 1, n)
    assert largest < 2**32
    assert (largest < 2**31) is (bits < 16)
    assert (2**bits - 1 + 2**n) * (2**bits + 2**n + 1) >= 2 ** (2 * bits), "a larger factor would not fit"


@pytest.mark.claim("PM-2")
@both_sides
def test_shrinking_in_steps_is_rounding_once(side, twins, device):
    """Every 16-bit code, through 8 and 4 to 2 bits. An even divisor would show that rounding twice differs."""
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    codes, scale, divisor = every_code(16, device), torch.ones(1, 1, 1, 1, device=device), 1
    for bits in HALVINGS:
        codes, scale = pm_kvq.shrink(codes, scale, bits=bits)
        divisor *= 2 ** (bits // 2) + 1
        assert codes.flatten().tolist() == [nearest(code, divisor) for code in range(2**16)]
        assert scale.item() == divisor == (2**16 - 1) // (2 ** (bits // 2) - 1)
    twice = [(2 * ((2 * code + 4) // 8) + 4) // 8 for code in range(2**8)]
    assert twice != [(2 * code + 16) // 32 for code in range(2**8)]


def progressive(code: int, n: int) -> int:
    """A 16-bit code, shrunk to n bits."""
    bits = 16
    while bits > n:
        bits //= 2
        code = nearest(code, 2**bits + 1)
    return code


@pytest.mark.claim("PM-3")
@pytest.mark.parametrize("n", [8, 4, 2])
def test_the_progressive_bound_is_the_direct_one_and_is_attained(n):
    """Half a step of n bits, in exact arithmetic and in 16-bit steps. A number is at most 1/2 from its 16-bit code, and
    a code, all of which are tried, at most (step - 1) / 2 from the shrunk one."""
    step = (2**16 - 1) // (2**n - 1)
    distances = {code: abs(code - progressive(code, n) * step) for code in range(2**16)}
    half = Fraction(1, 2)
    assert max(distances.values()) + half == Fraction(step, 2)
    assert max(distances.values()) + half > Fraction(step - 1, 2), "a smaller bound is exceeded"
    # Half a step itself is a half of 16 bits, which rounds to the even code below it, and then to 0. So it does if it
    # is quantized once.
    attained = Fraction(step, 2)
    code = round(attained)
    assert attained - code == half and progressive(code, n) == 0 == round(attained / step)


@pytest.mark.claim("PM-3")
@both_sides
def test_a_stored_group_attains_the_progressive_bound(side, twins, device):
    """0, 65535 and 10922.5, half a step of 2 bits: 10922 of 16 bits, then 42, 2 and 0, in steps of 21845."""
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = torch.tensor([0, 65535, 10922.5, 10923.0], device=device).view(1, 1, 1, 4)
    codes, scale, minimum = pm_kvq.quantize(x)
    seen = []
    for bits in HALVINGS:
        codes, scale = pm_kvq.shrink(codes, scale, bits=bits)
        seen.append(codes.flatten().tolist())
        assert bool(((pm_kvq.dequantize(codes, scale, minimum) - x).abs() <= scale / 2).all())
    assert seen == [[0, 255, 42, 43], [0, 15, 2, 3], [0, 3, 0, 1]]
    assert float((pm_kvq.dequantize(codes, scale, minimum) - x).abs().max()) == 10922.5 == scale.item() / 2


@pytest.mark.claim("PM-4")
@both_sides
@pytest.mark.parametrize("least_scale", [0.0, 1e-5])
def test_a_least_scale_of_16_bits_erases_narrow_groups_of_2_bits(least_scale, side, twins, device):
    """A group with a range of 0.1, in steps of 0.22, reads as its minimum. Directly quantized, it has all codes."""
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = torch.linspace(0.3, 0.4, 16, device=device).view(1, 1, 1, 16)
    found = pm_kvq.quantize(x, least_scale=least_scale)
    for bits in HALVINGS:
        found = type(found)(*pm_kvq.shrink(found.codes, found.scale, bits=bits), found.minimum)
    levels = found.codes.unique().tolist()
    assert levels == ([0] if least_scale else [0, 1, 2, 3])
    assert pm_kvq.quantize(x, bits=2, least_scale=least_scale).codes.unique().tolist() == [0, 1, 2, 3]
    wide = pm_kvq.quantize(7 * x, least_scale=least_scale)               # 0.7 > 65535 * 1e-5
    assert wide.codes.max().item() == 65535


@pytest.mark.claim("PM-5")
@pytest.mark.parametrize("options", [
    {"bits": 5, "window": 4, "max_tokens": 24}, {"bits": 2.7, "window": 8, "sinks": 3, "max_tokens": 300},
    {"bits": 4, "window": 1, "sinks": 0, "max_tokens": 64}, {"bits": 3.2, "max_tokens": 4096},
], ids=str)
def test_memory_stays_within_the_budget_in_the_widest_codes_that_do(options):
    config = PMKVQConfig(**options)
    room, widths = Fraction(config.bits) * config.max_tokens, []
    for seen in range(1, config.max_tokens + 1):
        widths.append(config.width_after(seen))
        packed = max(0, seen - config.sinks) // config.window * config.window

        def memory(width: int, packed: int = packed, seen: int = seen) -> int:
            return 16 * (seen - packed) + width * packed

        assert memory(widths[-1]) <= room, seen
        if len(widths) > 1 and widths[-1] < widths[-2]:
            assert memory(widths[-2]) > room, f"{seen} tokens would fit in {widths[-2]} bits"
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 16 > widths[-1]


@pytest.mark.claim("PM-6")
def test_scales_of_bfloat16_leave_16_bits_the_precision_of_8(twins: Any):
    """The largest number of a group reads as 65535 scales, and a scale of 8 significant bits is off by up to 2^-8."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(1, 1, 4000, 16, generator=generator)
    x[..., 0], x[..., 1] = 0, 1 + x[..., 1]
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        codes, scale, minimum = quantize(x, dtype=dtype)
        exact = dequantize(codes, scale.double(), minimum.double())
        errors[dtype] = float(((exact - x.double()).abs().amax(-1) / x.amax(-1)).max())
    half_step_of_8_bits = 1 / 255 / 2
    assert half_step_of_8_bits < errors[torch.bfloat16] <= 2.0**-8
    assert errors[torch.float32] < 2.0**-16


def widths_of(pm_kvq: Any, x: Tensor) -> dict[int, Any]:
    """The codes, scale and minimum of x with 16 bits, and shrunk to 8, 4 and 2."""
    found = {16: pm_kvq.quantize(x)}
    for bits in HALVINGS:
        last = found[bits]
        found[bits // 2] = type(last)(*pm_kvq.shrink(last.codes, last.scale, bits=bits), last.minimum)
    return found


def quarters(device: torch.device) -> Tensor:
    """[1, 1, 4096, 16]: multiples of 1/4, of a range of 65535, so that no scale rounds, and the middles of codes."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(4 * 65535, (1, 1, 4096, 16), generator=generator) / 4
    middles = torch.tensor([step * (2 * m + 1) for step in (257, 4369, 21845) for m in range(65535 // step)]) / 2
    x[0, 0, :len(middles), 2:5] = torch.stack([middles - 0.25, middles, middles + 0.25], -1)
    x[..., 0], x[..., 1] = 0, 65535
    return x.to(device)


@pytest.mark.claim("PM-8")
@both_sides
def test_shrunk_codes_are_those_of_direct_quantization(side, twins, device):
    """Also in the middle of two codes. Steps of another remainder would not do: 3, for example."""
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = quarters(device)
    for bits, shrunk in widths_of(pm_kvq, x).items():
        direct = pm_kvq.quantize(x, bits=bits)
        assert torch.equal(shrunk.codes, direct.codes) and torch.equal(shrunk.scale, direct.scale)
    assert round(round(1.5) / 3) != round(1.5 / 3)


@pytest.mark.claim("PM-7")
@both_sides
def test_wider_codes_are_more_precise_until_they_have_shrunk(side, twins, device):
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = quarters(device)
    found = widths_of(pm_kvq, x)
    largest = {bits: float((pm_kvq.dequantize(*of) - x).abs().max()) for bits, of in found.items()}
    for bits in HALVINGS:
        assert float((found[bits // 2].scale / found[bits].scale).max()) == 2 ** (bits // 2) + 1
        assert largest[bits] <= found[bits].scale.max() / 2 < largest[bits // 2]
    direct = pm_kvq.quantize(x, bits=2)
    assert float((pm_kvq.dequantize(*direct) - x).abs().max()) == largest[2]
