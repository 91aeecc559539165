"""ThinKV's claims about ternary, INT2, INT4 and FP8, and about precision by importance (claims TK-4, TK-5, TK-11).

See test_thinkv_claims_formats.py.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases import format_oracle as oracle
from kvtwin.conformance.cases.format_cases import fill
from kvtwin.conformance.papers.thinkv.format_errors import (
    CONTENTS,
    LARGEST,
    NORMAL,
    drawn,
    just_past_halves,
    quantized,
    relative,
)
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import BITS, Thought

pytestmark = pytest.mark.kind("claims")

UNIT = 2.0**-24


# ---- TK-4: ternary ---------------------------------------------------------------------------------------------------


@pytest.mark.claim("TK-4a")
def test_ternary_elements_and_groups(twins, device):
    """An element becomes the nearer of zero and s, so the error is at most s/2, or |x| - s beyond s. As s < (18/17)
    amax (TK-3b), this is less than (9/17) amax. Up to amax = 2^-10 the scale is 0, and numbers beyond 448 are
    clipped."""
    grid = torch.tensor([float(scale) for scale in oracle.E4M3[1:]])[:, None] * torch.linspace(1, 0, 65)
    near = just_past_halves([0.5, -0.5], 1, past=1)
    for x in (drawn("ternary"), grid, near, torch.tensor([[2.0**-10], [2.0**-11], [500.0], [1e30]])):
        found = quantized(x, "ternary", twins, device)
        alive = found.scale.expand_as(found.size) > 0
        bound = torch.maximum(found.scale / 2, found.size - found.scale)
        assert (found.error[alive] <= bound[alive]).all()
        assert torch.equal(alive, (found.amax > 2.0**-10).expand_as(alive))
        assert torch.equal(found.error[~alive], found.size[~alive])
        assert (relative(found, 1) < 9 / 17).all()
        if x is near:
            assert relative(found, 1).amax() > 0.999 * 9 / 17
    assert found.error.flatten().tolist()[2:] == (found.size - LARGEST).flatten().tolist()[2:]


@pytest.mark.claim("TK-4a")
def test_ternary_groups_reject_half_of_amax(twins, device):
    found = quantized(just_past_halves([0.5], 1, past=1), "ternary", twins, device)
    assert (relative(found, 1) > 0.5).any()
    assert (found.error > 0.99 * torch.maximum(found.scale / 2, found.size - found.scale)).any()


STEPS = 4000


def half_normal(low: Tensor, high: Tensor, power: int) -> Tensor:
    """The integral of a^power times the density of |N(0, 1)| from low to high, in float64."""
    def below(a: Tensor) -> Tensor:
        density = (-a * a / 2).exp() * (2 / torch.pi) ** 0.5
        mass = torch.erf(a / 2**0.5)
        return {0: mass, 1: -density, 2: mass - a * density}[power]

    return below(high) - below(low)


def ternary_mean_square(fraction: float, group: int = 16) -> tuple[float, float]:
    """The relative mean squared error and the share of zeros for Gaussian groups with a ternary scale of `fraction`
    times amax, not rounded. By quadrature over amax = m: one element is m, and the others are half-normal below m."""
    m = (torch.arange(STEPS, dtype=torch.float64) + 0.5) * (9 / STEPS)
    density = group * torch.erf(m / 2**0.5) ** (group - 1) * (-m * m / 2).exp() * (2 / torch.pi) ** 0.5 * (9 / STEPS)
    s, zero = fraction * m, torch.zeros(())
    others = half_normal(zero, s / 2, 2) + sum(
        weight * half_normal(s / 2, m, power) for power, weight in ((2, 1), (1, -2 * s), (0, s * s))
    )
    mass = torch.erf(m / 2**0.5)
    square = ((m - s) ** 2 + (group - 1) * others / mass) / group
    zeros = (group - 1) * half_normal(zero, s / 2, 0) / mass / group
    assert abs(density.sum() - 1) < 1e-9
    return float((density * square).sum()), float((density * zeros).sum())


@pytest.mark.claim("TK-4b")
def test_ternary_by_amax_loses_a_third_of_a_gaussian(twins, device):
    """By quadrature with unrounded scales, and for our formats, with rounded scales, on 3000 groups."""
    by_amax, zeros = ternary_mean_square(1)
    better, _ = ternary_mean_square(0.6)
    assert (f"{by_amax:.3f}", f"{zeros:.2f}", f"{better:.3f}") == ("0.343", "0.68", "0.180")
    x = torch.randn(3000, 16, generator=torch.Generator().manual_seed(3))
    nvfp4, amax, best = (
        float(quantized(x, fmt, twins, device, **options).error.square().mean())
        for fmt, options in (("nvfp4", {}), ("ternary", {}), ("ternary", {"scale_rule": "mse"}))
    )
    assert amax > 30 * nvfp4
    assert best < by_amax / 2
    assert best < better, "a fraction per group must be better than one for all"


@pytest.mark.claim("TK-4b")
def test_ternary_by_amax_rejects_being_near_the_best_fraction():
    errors = {k: ternary_mean_square(k / 16)[0] for k in range(8, 17)}
    assert min(errors, key=errors.__getitem__) in (9, 10)
    assert errors[16] > 1.8 * min(errors.values())
    assert max(errors.values()) == errors[16]


def four_codes(x: Tensor) -> dict[str, Tensor]:
    """INT2 with all four codes: -2 to 1 with a scale of amax / 2, and four levels from the minimum to the maximum."""
    half = x.abs().amax(-1, keepdim=True) / 2
    low, step = x.amin(-1, keepdim=True), (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 3
    return {"-2 to 1": (x / half).round().clamp(-2, 1) * half, "min to max": ((x - low) / step).round() * step + low}


@pytest.mark.claim("TK-4c")
def test_int2_with_four_codes_is_nearer_than_ternary(twins, device):
    """Relative squared errors on Gaussian groups of 16: .141 and .107, and .342 for ternary with amax as its scale."""
    x = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(3))
    power = float(x.double().square().mean())
    error = {name: float((y - x).double().square().mean()) / power for name, y in four_codes(x).items()}
    error["ternary"] = float(quantized(x, "ternary", twins, device).error.square().mean()) / power
    assert {name: round(number, 2) for name, number in error.items()} == {
        "-2 to 1": 0.14, "min to max": 0.11, "ternary": 0.34,
    }
    assert min(error.values()) != error["ternary"]


@pytest.mark.claim("TK-4c")
def test_int2_of_the_same_scaling_is_ternary_and_int4_no_worse_than_nvfp4(twins, device):
    """If INT2 is symmetric, both formats are -1, 0, 1 times e4m3(amax), and INT2 cannot cause the loss that table 9
    reports. INT4 is nearer to Gaussian numbers than NVFP4, so its error on ordinary numbers does not show it either."""
    module = twins.optimized.thinkv
    for x in (drawn("ternary"), drawn("nvfp4")):
        one, other = (module.quantize(x.to(device), fmt, axis=-1) for fmt in ("int2", "ternary"))
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(3))
    nvfp4, int4 = (float(quantized(x, fmt, twins, device).error.square().mean()) for fmt in ("nvfp4", "int4"))
    assert int4 < 0.9 * nvfp4


@pytest.mark.claim("TK-4c")
def test_int2_rejects_another_scaling_and_int4_where_one_element_stands_out(twins, device):
    """INT2 from -2 to 1 would be another format. For groups with an outlier, NVFP4 is better than INT4."""
    x = drawn("ternary")[:300]
    ternary = quantized(x, "ternary", twins, device)
    scale = (x.abs().amax(-1, keepdim=True) / 2).to(torch.float8_e4m3fn).float()
    asymmetric = (x / scale.clamp_min(2.0**-9)).round().clamp(-2, 1) * scale
    assert not torch.equal((asymmetric - x).abs().double(), ternary.error)
    outlier = torch.randn(4000, 16, generator=torch.Generator().manual_seed(4))
    outlier[:, 0] = 30
    nvfp4, int4 = (float(quantized(outlier, fmt, twins, device).error.square().mean()) for fmt in ("nvfp4", "int4"))
    assert nvfp4 < int4


# ---- TK-5: FP8 -------------------------------------------------------------------------------------------------------

#: |x - x'| has u |x| for the quotient, |r - c| s, and u c s for the product, with c <= (18/17) r. This bounds the sum
#: of the rounding errors.
SLACK = 1 + 40 * UNIT


def fp8_rows() -> Tensor:
    """Chunks of one token, and all midpoints between codes with four scales."""
    rows = [fill(content, torch.Generator().manual_seed(5), (6, 128), "fp8") for content in CONTENTS]
    grid = torch.tensor([448.0, *map(float, oracle.midpoints(oracle.E4M3)), 0])
    x = torch.cat([torch.cat(rows).float().nan_to_num(), grid * 2.0 ** torch.tensor([-110.0, -9, 0, 100])[:, None]])
    return x[x.abs().amax(-1) >= LARGEST * 2.0**-126]


@pytest.mark.claim("TK-5a")
def test_fp8_elements_are_off_by_a_17th(twins, device):
    """Rounding to four bits loses at most 1/17, half a step after a power of two. Below the smallest normal number 2^-6
    s, it loses at most half of the step 2^-9 s. In the highest binade a step is 32 s = amax / 14."""
    x = fp8_rows()
    found = quantized(x, "fp8", twins, device)
    bound = torch.maximum(found.size / 17, found.scale * 2.0**-10)
    assert (found.error <= bound * SLACK).all()
    assert (found.error <= found.amax / 28 * SLACK).all()
    for part, limit in ((found.size >= found.scale * NORMAL, found.size / 17),
                        (found.size < found.scale * NORMAL, found.scale.expand_as(found.size) * 2.0**-10)):  # fmt: skip
        assert (found.error[part] > 0.99 * limit[part]).any()
    assert (found.error > 0.99 * found.amax / 28).any()


@pytest.mark.claim("TK-5a")
def test_fp8_elements_reject_an_18th_and_subnormal_scales(twins, device):
    found = quantized(fp8_rows(), "fp8", twins, device)
    assert (found.error > torch.maximum(found.size / 18, found.scale * 2.0**-10) * SLACK).any()
    tiny = quantized(torch.tensor([[627 * 2.0**-149]]), "fp8", twins, device)          # s = round(1.4) 2^-149
    assert tiny.scale.item() == 2.0**-149
    assert (tiny.error > 4 * tiny.size / 17).all()


@pytest.mark.claim("TK-5b")
def test_a_scale_for_the_whole_tensor_is_not_known_when_its_tokens_come(twins, device):
    """The first 16 tokens leave the buffer before the next ones arrive. With one scale for all tokens, their codes
    would change."""
    module = twins.optimized.thinkv
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(6)).to(device)
    x[20] *= 100
    first = module.quantize(x[:16], "fp8", axis=-2, group=16)
    whole = module.quantize(x, "fp8", axis=-2, group=32)
    assert not torch.equal(first.codes, whole.codes[:16])
    # If the scale of the first chunk were kept, later tokens would saturate.
    assert x[20].abs().amax() > 448 * first.scales.item()
    # With one scale per chunk, written codes do not change.
    chunks = module.quantize(x, "fp8", axis=-2, group=16)
    assert torch.equal(first.codes, chunks.codes[:16])


@pytest.mark.claim("TK-5b")
def test_a_scale_for_the_whole_tensor_rejects_harm_where_the_largest_comes_first(twins, device):
    """If no later token is larger, the first scale is that of the tensor."""
    module = twins.optimized.thinkv
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(6)).to(device)
    x[3] *= 100
    first, whole = module.quantize(x[:16], "fp8", axis=-2), module.quantize(x, "fp8", axis=-2, group=32)
    assert torch.equal(first.codes, whole.codes[:16])


# ---- TK-11: precision follows importance -----------------------------------------------------------------------------


def follows(formats: dict[str, str], *, strictly: bool) -> bool:
    """Whether a more important type has more bits (or at least as many, unless `strictly`). Importance is T < E < R."""
    bits = [BITS[formats[thought.name[0]]] for thought in sorted(Thought)]
    return all(low < high or (low == high and not strictly) for low, high in pairwise(bits))


@pytest.mark.claim("TK-11")
def test_higher_importance_is_no_lower_precision():
    ours = dict(ThinKVConfig().formats)
    assert not follows(ours, strictly=True), "both R and E have four bits"
    assert follows(ours, strictly=False)
    # The first assignment in section 3.2.2.
    assert follows({"R": "fp8", "E": "nvfp4", "T": "ternary"}, strictly=True)


@pytest.mark.claim("TK-11")
def test_higher_importance_rejects_fewer_bits():
    assert not follows({"R": "ternary", "E": "nvfp4", "T": "ternary"}, strictly=False)
    assert not follows({"R": "nvfp4", "E": "nvfp4", "T": "fp8"}, strictly=False)
    assert Fraction(BITS["nvfp4"], BITS["ternary"]) == 2
