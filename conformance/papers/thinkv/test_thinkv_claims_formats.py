"""ThinKV's claims about E4M3 and NVFP4, and the true error bounds (claims TK-2, TK-3; more in ..._precision).

Each bound is a theorem, with its proof in the docstring. It holds for all drawn inputs, and is attained to within 1 %.
A test named ..._rejects_... shows that a slightly changed statement fails.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases import format_oracle as oracle
from kvtwin.conformance.papers.thinkv.format_errors import (
    LARGEST,
    NORMAL,
    drawn,
    just_past_halves,
    quantized,
    relative,
    ulps,
)
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import Quantized

pytestmark = pytest.mark.kind("claims")

# ---- TK-2: E4M3 ------------------------------------------------------------------------------------------------------


def all_codes(twins, device) -> list[float]:
    """The values of the 256 fp8 codes with scale 1."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)[None]
    q = Quantized(codes, torch.ones(1, device=device), "fp8", -2, 1, codes.shape)
    return twins.optimized.thinkv.dequantize(q, torch.float32)[0].tolist()


def e4m3() -> list[float]:
    """1 sign bit, 4 exponent bits and 3 mantissa bits. There are no infinities; NaN has all bits of the magnitude
    set."""
    half = [*map(float, oracle.E4M3), float("nan")]
    return half + [-value for value in half]


def with_infinities() -> list[float]:
    """The same layout with IEEE's infinities and NaN, which use up the largest exponent."""
    half = [float(oracle.floating(code, 4, 3)) for code in range(120)] + [float("inf")] + [float("nan")] * 7
    return half + [-value for value in half]


def e5m2() -> list[float]:
    half = [float(oracle.floating(code, 5, 2)) for code in range(124)] + [float("inf")] + [float("nan")] * 3
    return half + [-value for value in half]


def same_numbers(one: list[float], other: list[float]) -> bool:
    return all(x == y or (x != x and y != y) for x, y in zip(one, other, strict=True))


@pytest.mark.claim("TK-2a")
def test_fp8_is_e4m3(twins, device):
    found = all_codes(twins, device)
    assert same_numbers(found, e4m3())
    numbers = sorted({x for x in found if x == x})
    assert (len(numbers), numbers[-1]) == (253, LARGEST)
    positive = [x for x in numbers if x > 0]
    assert positive[:9] == [n * 2.0**-9 for n in range(1, 9)] + [9 * 2.0**-9]          # subnormal up to 2^-6
    assert [code for code, x in enumerate(found) if x != x] == [127, 255]


@pytest.mark.claim("TK-2a")
def test_fp8_rejects_infinities_and_five_bits_of_exponent(twins, device):
    found = all_codes(twins, device)
    for other, largest in ((with_infinities(), 240), (e5m2(), 57344)):
        assert max(x for x in other if x < float("inf")) == largest
        assert not same_numbers(found, other)


STATEMENTS = {
    # where: the formats of the types that it names
    "D.3, FP8": {"R": "fp8"},
    "D.3, NVFP4": {"R": "nvfp4", "E": "nvfp4"},
    "D.3, Ternary": {"T": "ternary"},
    "3.2.2, first": {"R": "fp8", "E": "nvfp4", "T": "ternary"},
    "5.1": {"R": "nvfp4", "E": "nvfp4", "T": "ternary"},
}


def agree(statements: list[str]) -> bool:
    """Whether one table of formats agrees with all of them."""
    table: dict[str, set[str]] = {}
    for where in statements:
        for letter, fmt in STATEMENTS[where].items():
            table.setdefault(letter, set()).add(fmt)
    return all(len(formats) == 1 for formats in table.values())


@pytest.mark.claim("TK-2b")
def test_reasoning_tokens_have_two_formats():
    assert not agree(list(STATEMENTS))
    assert not agree(["D.3, FP8", "D.3, NVFP4"])
    # Each reading by itself is consistent. Our table is that of the experiments.
    assert agree(["D.3, FP8", "D.3, Ternary", "3.2.2, first"])
    assert agree(["D.3, NVFP4", "D.3, Ternary", "5.1"])
    assert dict(ThinKVConfig().formats) == STATEMENTS["5.1"]


@pytest.mark.claim("TK-2c")
def test_one_scale_reaches_from_6_times_2_to_the_minus_10_to_2688(twins, device):
    """Within the range, the largest element keeps at least 2/3 of its value. Below it everything becomes zero, and
    above it numbers are clipped. NVIDIA's NVFP4 has a second scale per tensor, which brings any tensor into the
    range."""
    low, high = 6 * 2.0**-10, 6 * LARGEST
    sizes = torch.logspace(-9, 9, 400, dtype=torch.float64).float()
    x = torch.cat((sizes, ulps(torch.tensor([low, high]), 3)))[:, None]
    found = quantized(x, "nvfp4", twins, device)
    kept = 1 - found.error / found.size
    inside = (found.size > low) & (found.size <= high)
    assert (kept[inside] > 2 / 3).all()
    assert (kept[found.size <= low] == 0).all()
    beyond = found.size > high
    assert (found.error[beyond] == found.size[beyond] - high).all()
    for factor in (1e-7, 1e7):
        tensor = drawn("nvfp4")[:16] * factor
        error = quantized(tensor, "nvfp4", twins, device).error.amax()
        second = quantized(tensor, "nvfp4", twins, device, tensor_scale=True).error.amax()
        amax = tensor.abs().amax().double()
        assert error > 0.99 * amax
        assert second < 0.2 * amax


@pytest.mark.claim("TK-2c")
def test_one_scale_rejects_a_float32_step_more_at_either_end(twins, device):
    low, high = (torch.tensor([end]) for end in (6 * 2.0**-10, 6 * LARGEST))
    found = quantized(torch.cat([ulps(low, 1), ulps(high, 1)])[:, None], "nvfp4", twins, device)
    assert [bool(error < size) for error, size in zip(found.error[:3], found.size[:3], strict=True)] == [
        False, False, True,
    ]
    assert [bool(error == 0) for error in found.error[3:]] == [False, True, False]


# ---- TK-3: NVFP4 -----------------------------------------------------------------------------------------------------


def nvfp4_bound(size: Tensor, scale: Tensor) -> Tensor:
    """Half the distance of the two magnitudes around an element. Beyond the last magnitude: the distance to it."""
    steps = torch.where(size <= 2 * scale, scale / 4, torch.where(size <= 4 * scale, scale / 2, scale))
    return torch.where(size > 6 * scale, size - 6 * scale, steps)


@pytest.mark.claim("TK-3a")
def test_nvfp4_elements_are_off_by_half_a_step_at_most(twins, device):
    """E2M1's magnitudes are s/2 apart up to 2s, s apart up to 4s, and 2s apart up to 6s. An element becomes the
    nearest. The comparison with a midpoint (3 bits times the 4 of s) is exact in float32, so no rounding error is
    added."""
    scales = torch.tensor([float(scale) for scale in oracle.E4M3[1:]])[:, None]
    grid = scales * torch.tensor([6.0, *torch.linspace(0, 6, 241)])
    for x in (drawn("nvfp4"), grid):
        found = quantized(x, "nvfp4", twins, device)
        alive = found.scale.expand_as(found.size) > 0
        assert (found.error[alive] <= nvfp4_bound(found.size, found.scale)[alive]).all()
        assert (found.error[~alive] == found.size[~alive]).all()
    # The bound is attained everywhere on the grid.
    for half, error in ((0.25, 0.25), (0.75, 0.25), (1.25, 0.25), (1.75, 0.25), (2.5, 0.5), (3.5, 0.5), (5, 1)):
        at = (grid / scales - half).abs().argmin(-1, keepdim=True)
        assert torch.equal(found.size.gather(-1, at), half * found.scale)
        assert torch.equal(found.error.gather(-1, at), error * found.scale)


@pytest.mark.claim("TK-3a")
@pytest.mark.parametrize("piece", range(3))
def test_nvfp4_elements_reject_a_hundredth_less_in_any_piece(piece, twins, device):
    found = quantized(drawn("nvfp4"), "nvfp4", twins, device)
    ends = torch.tensor([0.0, 2, 4, 6]).double() * found.scale[..., None]
    inside = (found.size > ends[..., piece]) & (found.size <= ends[..., piece + 1])
    assert (found.error[inside] > 0.99 * nvfp4_bound(found.size, found.scale)[inside]).any()


@pytest.mark.claim("TK-3b")
def test_nvfp4_groups_are_off_by_less_than_3_17ths_of_amax(twins, device):
    """s is rounded up by less than 18/17 (from just above 17/16 to 18/16; the midpoint itself rounds down, to even). An
    element of 5 s then has the error s < (18/17) (amax / 6) = (3/17) amax. If s is rounded down, by at most 1/17,
    saturation costs amax - 6 s <= amax/17. The bound is a supremum, which is approached but never attained."""
    assert (relative(quantized(drawn("nvfp4"), "nvfp4", twins, device), 6) < 3 / 17).all()
    found = quantized(just_past_halves([5.0, -5.0, 2.5], 6, past=1), "nvfp4", twins, device)
    ratio = relative(found, 6)
    assert (ratio < 3 / 17).all()
    assert ratio.amax() > 0.999 * 3 / 17
    # The midpoint itself rounds down, to even.
    at_half = relative(quantized(just_past_halves([5.0, -5.0, 2.5], 6, past=0), "nvfp4", twins, device), 6)
    assert at_half.amax() < 3 / 17 * 0.99


@pytest.mark.claim("TK-3b")
def test_nvfp4_groups_reject_a_sixth_and_3_17ths_under_small_scales(twins, device):
    """amax / 6 is the bound for a scale that is not rounded."""
    found = quantized(just_past_halves([5.0], 6, past=1), "nvfp4", twins, device)
    assert (relative(found, 6) > 1 / 6).any()
    below = quantized(torch.tensor([[8.99 * 2.0**-9, 0.0]]), "nvfp4", twins, device)
    assert (below.error > 3 / 17 * below.amax).any()
    assert (below.amax < 6 * NORMAL).all()


@pytest.mark.claim("TK-3c")
def test_nvfp4_groups_of_small_scales_lose_up_to_a_third_or_all(twins, device):
    """Scales below 2^-6 are multiples of q = 2^-9. The first one is the worst: amax < 9 q has the scale q and saturates
    at 6 q, which loses up to a third. Up to amax = 3 q the scale is 0."""
    q = 2.0**-9
    x = torch.cat((torch.linspace(2.9 * q, 60 * q, 4001), ulps(torch.tensor([3 * q, 9 * q, 15 * q]), 2)))[:, None]
    x = torch.cat((x, drawn("nvfp4")[: len(x)].repeat(2, 1)[: len(x), :3] * x), 1)
    x = torch.where(x.abs() > x[:, :1], 0, x)
    found = quantized(x, "nvfp4", twins, device)
    alive = (found.amax > 3 * q).flatten()
    ratio = found.error / found.amax
    assert torch.equal(alive, found.scale.flatten() > 0)
    assert (ratio[alive] < 1 / 3).all()
    assert ratio[alive].amax() > 0.999 / 3
    assert torch.equal(found.error[~alive], found.size[~alive])


@pytest.mark.claim("TK-3c")
def test_nvfp4_groups_of_small_scales_reject_three_tenths(twins, device):
    found = quantized(torch.tensor([[8.99 * 2.0**-9]]), "nvfp4", twins, device)
    assert (found.error > 0.3 * found.amax).all()


@pytest.mark.claim("TK-3d")
def test_a_smaller_group_can_be_further_off(twins, device):
    """6 and 1 are both exact with scale 1. In a group of its own, 1 has the scale e4m3(1/6) = 11/64 and becomes
    66/64."""
    together = quantized(torch.tensor([[6.0, 1.0]]), "nvfp4", twins, device)
    alone = quantized(torch.tensor([[6.0], [1.0]]), "nvfp4", twins, device)
    assert together.error.tolist() == [[0, 0]]
    assert alone.error.tolist() == [[0], [1 / 32]]
    # Ranges are not wider, so scales are not larger, and the bound of TK-3b falls with the range.
    whole = drawn("nvfp4")
    parts = whole.reshape(-1, 8)
    scale, part = (quantized(x, "nvfp4", twins, device).scale for x in (whole, parts))
    assert (part.reshape(-1, 2) <= scale).all()


@pytest.mark.claim("TK-3d")
def test_smaller_groups_reject_more_error_in_the_mean(twins, device):
    """On average over Gaussian numbers, the error of a smaller group is smaller. So a statement about means is true."""
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(2))
    errors = [quantized(x.reshape(-1, n), "nvfp4", twins, device).error.square().mean() for n in (16, 8, 4)]
    assert errors[0] > errors[1] > errors[2]
