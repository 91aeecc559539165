"""PM-KVQ's codes: quantizing against exact arithmetic, shrinking of every code, both sides bit for bit, bad input:
what only our own sides promise.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.format_oracle import float32
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.judge import reconstructed
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.pm_kvq.test_pm_kvq import both_sides

pytestmark = pytest.mark.kind("equivalence")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (16, 8, 4, 2)
CONTENTS = ("ordinary", "sizes", "shifted", "constant", "subnormal", "special")
some = settings(max_examples=max(at_least(4), settings().max_examples // 3))


def numbers(content: str, generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers [B, H, T, D] in float64; a test rounds them to its dtype."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    of_token = torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64)
    if content == "sizes":
        return x * 10 ** (8 * of_token - 4)
    if content == "shifted":
        return x / 64 + 1000 * (of_token - 0.5)
    if content == "constant":
        return torch.where(of_token < 0.5, torch.full_like(x, 0.3), x.sign() * 0.0)
    if content == "subnormal":
        return x * 2.0**-135
    if content == "special":
        other = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, -0.0], dtype=torch.float64)
        chosen = other[torch.randint(len(other), shape, generator=generator)]
        return torch.where(of_token * torch.rand(shape, generator=generator) > 0.6, chosen, x)
    return x


@st.composite
def cases(draw: st.DrawFn, content: tuple[str, ...] = CONTENTS) -> dict[str, Any]:
    """x [B, H, T, D], and the options of `quantize`."""
    channels, group = draw(st.sampled_from(((16, 128), (24, 8), (32, 2), (48, 16), (80, 128), (96, 32), (128, 64))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    heads, dtype = draw(st.sampled_from(((1, 1), (2, 1), (1, 2)))), draw(st.sampled_from(DTYPES))
    x = numbers(draw(st.sampled_from(content)), generator, *heads, draw(st.integers(1, 5)), channels).to(dtype)
    layout = draw(st.sampled_from(("contiguous", "sliced", "spread", "channels_first", "transposed")))
    return {
        "x": lay_out(x, layout), "bits": draw(st.sampled_from(WIDTHS)), "group": group,
        "least_scale": draw(st.sampled_from((0.0, 0.0, 1e-5, 0.01))),
    }


@both_sides
@given(case=cases(content=CONTENTS[:-2]))
@some
def test_codes_scales_and_minima_are_those_of_exact_arithmetic(side, case, twins, device):
    """In rational arithmetic, where only the specified operations round."""
    x, bits, least = case["x"], case["bits"], case["least_scale"]
    found = getattr(twins, side).baselines.pm_kvq.quantize(**{**case, "x": x.to(device)})
    codes, scales, minima = (part.cpu() for part in found)
    group, levels = x.shape[-1] // scales.shape[-1], 2**bits - 1
    assert group == min(case["group"], x.shape[-1])
    for row in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).tolist()[:10]:
        for number, part in enumerate(x[tuple(row)].view(-1, group)):
            line = part.tolist()
            width = float32(Fraction(max(line)) - Fraction(min(line)))
            scale = torch.tensor(float(max(float32(width / levels), float32(Fraction(least))))).to(scales.dtype)
            assert scales[*row, number] == scale, (line, scale)
            assert minima[*row, number] == min(line)
            step = Fraction(float(scale))
            ratios = (float32(float32(Fraction(one) - Fraction(min(line))) / step) if step else 0 for one in line)
            expected = [min(round(ratio), levels) for ratio in ratios]                     # halves to even
            assert codes[(*row, slice(number * group, (number + 1) * group))].tolist() == expected


@given(case=cases())
@some
def test_both_sides_store_shrink_and_read_the_same_bits(case, twins, device):
    sides = [side.baselines.pm_kvq for side in (twins.reference, twins.optimized)]
    expected, found = (pm_kvq.quantize(**case | {"x": case["x"].to(device)}) for pm_kvq in sides)
    bits = case["bits"]
    while True:
        for name, one, other in zip(expected._fields, found, expected, strict=True):
            assert one.dtype == other.dtype
            assert_same(one, other, what=f"{name} of {bits} bits")
        for dtype in (None, torch.float32, torch.bfloat16):
            read, truth = (pm_kvq.dequantize(*expected, dtype=dtype) for pm_kvq in reversed(sides))
            assert read.dtype == truth.dtype == (dtype or case["x"].dtype)
            assert_same(read, truth, what=f"numbers in {dtype}")
        if bits == 2:
            return
        shrunk = [pm_kvq.shrink(expected.codes, expected.scale, bits=bits) for pm_kvq in sides]
        expected, found = (type(expected)(*one, expected.minimum) for one in shrunk)
        bits //= 2


@both_sides
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_error_is_at_most_half_a_step(bits, dtype, side, twins, device):
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    generator = torch.Generator().manual_seed(bits)
    for content in ("ordinary", "sizes", "shifted", "subnormal"):
        x = numbers(content, generator, 1, 2, 8, 32).to(dtype).to(device)
        codes, scale, minimum = pm_kvq.quantize(x, bits=bits, group=16)
        exact = twins.reference.baselines.pm_kvq.dequantize(codes, scale.double(), minimum.double())
        bound = reconstructed.group_error(scale.double(), 2**bits - 1, scale.dtype).repeat_interleave(16, -1)
        assert bool(((exact - x.double()).abs() <= bound).all()), content


@both_sides
def test_a_scale_of_float16_is_float32(side, twins, device):
    """A range of 1 has a scale of 1 / 65535, which float16 would round by up to 0.2 %."""
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = torch.linspace(0, 1, 16, device=device).half().view(1, 1, 1, 16)
    codes, scale, minimum = pm_kvq.quantize(x)
    assert (scale.dtype, minimum.dtype) == (torch.float32, torch.float16)
    assert scale.item() == torch.tensor(1 / 65535).item() and codes[..., -1].item() == 65535


@both_sides
def test_halves_round_to_even(side, twins, device):
    x = torch.tensor([0, 0.5, 1.5, 2.5, 15, 3, 4, 7], device=device).view(1, 1, 1, 8)
    codes, scale, minimum = getattr(twins, side).baselines.pm_kvq.quantize(x, bits=4)
    assert (scale.item(), minimum.item()) == (1, 0)
    assert codes.flatten().tolist() == [0, 0, 2, 2, 15, 3, 4, 7]


@both_sides
def test_a_constant_group_has_codes_and_a_scale_of_zero(side, twins, device):
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = torch.full((1, 1, 2, 16), 0.3, device=device)
    x[..., 8:] = torch.randn(8)
    found = pm_kvq.quantize(x, group=8)
    assert bool((found.scale[..., 0] == 0).all()) and bool((found.codes[..., :8] == 0).all())
    assert_same(pm_kvq.dequantize(*found)[..., :8], x[..., :8], what="constant numbers")
    assert bool((found.scale[..., 1] > 0).all())


@both_sides
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("channel", [6, 13])
def test_a_group_that_is_not_finite_reads_as_nan_and_no_other_does(channel, bad, side, twins, device):
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(1)).to(device)
    x[0, 1, 2, channel] = bad
    found, whole = pm_kvq.quantize(x, group=4), pm_kvq.quantize(x.nan_to_num(0, 0, 0), group=4)
    read, expected = pm_kvq.dequantize(*found), pm_kvq.dequantize(*whole)
    group = torch.zeros(1, 2, 3, 16, dtype=torch.bool, device=device)
    group[0, 1, 2, channel // 4 * 4:channel // 4 * 4 + 4] = True
    assert bool(read[group].isnan().all())
    assert_same(read[~group], expected[~group], what="other groups")
    assert int((found.scale == 0).sum()) == int(found.minimum.isnan().sum()) == 1


@both_sides
def test_scales_are_at_least_as_large_as_asked(side, twins, device):
    """Then a narrow group does not use all codes."""
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    x = torch.linspace(0, 0.25, 16, device=device).view(1, 1, 1, 16)
    found = pm_kvq.quantize(x, bits=8, least_scale=0.125)
    assert found.scale.item() == 0.125 and found.codes.max().item() == 2
    assert pm_kvq.quantize(x * 1024, bits=8, least_scale=0.125).codes.max().item() == 255
    # An int beyond 64 bits is a float, too.
    assert pm_kvq.quantize(x, bits=8, least_scale=10**30).codes.max().item() == 0
