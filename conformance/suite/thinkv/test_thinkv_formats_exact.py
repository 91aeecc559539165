"""ThinKV's number formats where only one answer is right, on both sides: special numbers, limits of the scales, ties,
and invariances.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases import format_oracle as oracle
from kvtwin.conformance.cases.format_cases import FORMATS, fill
from kvtwin.conformance.cases.layouts import lay_out

pytestmark = [pytest.mark.kind("laws"), pytest.mark.parametrize("side", ("reference", "optimized"))]
every_format = pytest.mark.parametrize("fmt", FORMATS)
by_group = [fmt for fmt in FORMATS if fmt != "fp8"]
NAN, INF = math.nan, math.inf
LARGEST = {fmt: float(values[-1]) for fmt, values in oracle.MAGNITUDES.items()}


def module_of(twins, side: str):
    return getattr(twins, side).thinkv


def scales_of(q) -> list[float]:
    """The first-level scales as numbers, by torch's decoding."""
    scales = q.scales if q.fmt == "fp8" else q.scales.view(torch.float8_e4m3fn)
    return scales.float().flatten().tolist()


def ordinary(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(one, other) -> bool:
    """Whether codes and scales are equal."""
    return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


# Special numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.property("extreme_numbers")
@every_format
def test_nan_quantizes_to_zero_and_infinity_to_the_largest_number(fmt, side, twins, device):
    module, half = module_of(twins, side), 1 << oracle.BITS[fmt] - 1
    top = len(oracle.MAGNITUDES[fmt]) - 1
    row = [NAN, 1.0, -0.0, 0.0, -1.0, NAN]
    q = module.quantize(torch.tensor([row], device=device), fmt, axis=-1)
    assert q.codes.tolist() == [[0, top, 0, 0, top + half, 0]]
    clean = module.quantize(torch.tensor([row], device=device).nan_to_num(0.0), fmt, axis=-1)
    assert same(q, clean)
    back = module.dequantize(q, torch.float32)
    assert back.tolist() == module.dequantize(clean, torch.float32).tolist()
    assert not (back.signbit() & (back == 0)).any(), "a zero must have no sign"

    infinite = module.quantize(torch.tensor([[INF, -INF, 1.0, NAN]], device=device), fmt, axis=-1)
    assert infinite.codes.tolist() == [[top, top + half, 0, 0]]
    limit = torch.finfo(torch.float32).max
    assert same(infinite, module.quantize(torch.tensor([[limit, -limit, 1.0, 0.0]], device=device), fmt, axis=-1))
    assert scales_of(infinite) == [limit / 448 if fmt == "fp8" else 448.0]
    assert module.dequantize(infinite, torch.float32).isfinite().all()

    nothing = module.quantize(torch.full((2, 3), NAN, device=device), fmt, axis=-1)
    assert not nothing.codes.any() and not any(scales_of(nothing))


@pytest.mark.property("extreme_numbers")
@every_format
def test_codes_of_a_negative_zero_are_read_as_zero(fmt, side, twins, device):
    module = module_of(twins, side)
    q = module.quantize(torch.ones(1, 4, device=device), fmt, axis=-1)
    back = module.dequantize(q._replace(codes=torch.full_like(q.codes, 1 << oracle.BITS[fmt] - 1)), torch.float32)
    assert (back == 0).all() and not back.signbit().any()


@pytest.mark.property("accuracy")
def test_codes_are_sign_and_index(side, twins, device):
    """The bits, written out."""
    module = module_of(twins, side)
    x = torch.tensor([[6.0, -4, 3, 2, -1.5, 1, 0.5, -0.5, 0, 5, -5, 2.5]], device=device)
    assert module.quantize(x, "nvfp4", axis=-1).codes.tolist() == [[7, 14, 5, 4, 11, 2, 1, 9, 0, 6, 14, 4]]
    x = torch.tensor([[1.0, -1, 0.5, 0.51, -0.5, -0.51]], device=device)
    for fmt in ("ternary", "int2"):
        assert module.quantize(x, fmt, axis=-1).codes.tolist() == [[1, 3, 0, 1, 0, 3]]
    x = torch.tensor([[7.0, -7, 0.5, 1.5, -2.5, 6.5, 3.4]], device=device)
    assert module.quantize(x, "int4", axis=-1).codes.tolist() == [[7, 15, 0, 2, 10, 6, 3]]
    x = torch.tensor([[448.0, -448, 1, 0.0625, 2**-9, -(2**-10), 432, 1.0625]], device=device)
    assert module.quantize(x, "fp8", axis=-1).codes.tolist() == [[126, 254, 56, 24, 1, 0, 126, 56]]


# Scales at both ends -------------------------------------------------------------------------------------------------


@pytest.mark.property("extreme_numbers")
@pytest.mark.parametrize("fmt", by_group)
def test_scales_vanish_at_2_to_the_minus_10_and_end_at_448(fmt, side, twins, device):
    module, largest = module_of(twins, side), LARGEST[fmt]
    edge = largest * 2.0**-10
    more = torch.nextafter(torch.tensor(edge), torch.tensor(1.0)).item()
    x = torch.tensor([[edge], [more], [448 * largest], [464 * largest], [1e30]], device=device)
    q = module.quantize(x, fmt, axis=-1)
    top = len(oracle.MAGNITUDES[fmt]) - 1
    assert scales_of(q) == [0, 2**-9, 448, 448, 448]
    assert q.codes.flatten()[[0, 2, 3, 4]].tolist() == [0, top, top, top]
    assert module.dequantize(q, torch.float32).flatten().tolist()[2:] == [448 * largest] * 3


@pytest.mark.property("extreme_numbers")
def test_fp8_scales_go_as_far_as_float32(side, twins, device):
    module = module_of(twins, side)
    least = 2.0**-149
    x = torch.tensor([[224 * least], [225 * least], [448 * least], [2.0**-120], [3.4e38]], device=device)
    q = module.quantize(x, "fp8", axis=-1, group=1)
    assert scales_of(q) == [float(oracle.float32(Fraction(number) / 448)) for number in x.flatten().tolist()]
    assert scales_of(q)[0] == 0 and q.codes[0].item() == 0
    # Division by a subnormal scale: 225 / 1 does not saturate, and 448 / 1 is the largest code.
    assert q.codes.flatten().tolist()[1:] == [oracle.quantize([n], "fp8").codes[0] for n in x.flatten().tolist()[1:]]


@pytest.mark.property("extreme_numbers")
def test_a_second_scale_reaches_what_e4m3_does_not(side, twins, device):
    module = module_of(twins, side)
    x = ordinary(3, 2, 32).to(device) * 1e-7
    x[0, 0, 5] = 1e-6  # the largest element, which only the first program reads
    without, with_one = (module.quantize(x, "nvfp4", axis=-1, tensor_scale=flag) for flag in (False, True))
    assert without.tensor_scale is None and not without.codes.any()
    assert with_one.tensor_scale.shape == () and with_one.tensor_scale.dtype == torch.float32
    assert Fraction(with_one.tensor_scale.item()) == oracle.tensor_scale(x.flatten().tolist())
    assert max(scales_of(with_one)) == 448
    assert (module.dequantize(with_one, torch.float32) - x).abs().max() <= x.abs().max() / 4
    for factor in (0.0, 1e-45, 1e38):  # g = 0, g underflows, steps of a few units of the smallest number
        q = module.quantize(x.sign() * factor, "nvfp4", axis=-1, tensor_scale=True)
        assert module.dequantize(q, torch.float32).isfinite().all()
        assert bool(q.codes.any()) == (factor == 1e38)


# Inputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@every_format
def test_inputs_are_rounded_to_float32_once(fmt, side, twins, device):
    module = module_of(twins, side)
    x = ordinary(4, 24).to(device)
    for dtype in (torch.float16, torch.bfloat16):
        assert same(module.quantize(x.to(dtype), fmt, axis=-2), module.quantize(x.to(dtype).float(), fmt, axis=-2))
    # Above the midpoint between two codes by less than the resolution of float32.
    halves = torch.tensor([float(half) for half in oracle.midpoints(oracle.MAGNITUDES[fmt])[::2]], dtype=torch.float64)
    row = torch.cat((torch.tensor([LARGEST[fmt]], dtype=torch.float64), halves * (1 + 2.0**-40)))[None].to(device)
    assert (row != row.float()).any()
    assert same(module.quantize(row, fmt, axis=-1, group=100), module.quantize(row.float(), fmt, axis=-1, group=100))
    huge = torch.tensor([[1e300, -1.0]], dtype=torch.float64, device=device)
    assert same(module.quantize(huge, fmt, axis=-1), module.quantize(huge.float(), fmt, axis=-1))


@pytest.mark.property("layouts")
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])  # one for each kernel
@pytest.mark.parametrize("layout", ["sliced", "spread", "channels_first", "transposed", "far"])
def test_strides_do_not_matter(fmt, layout, side, twins, device):
    module = module_of(twins, side)
    x = ordinary(2, 2, 5, 20).half().to(device)
    for axis in (-1, -2) if fmt != "fp8" else (-1,):
        expected = module.quantize(x, fmt, axis=axis)
        assert same(module.quantize(lay_out(x, layout), fmt, axis=axis), expected)
        positive = module.quantize(lay_out(x, layout), fmt, axis=x.dim() + axis)
        assert positive.axis == axis and same(positive, expected)
    row = x[:1, :1]
    repeated = module.quantize(row.expand(2, 3, 5, 20), fmt, axis=-1)
    assert torch.equal(repeated.codes, module.quantize(row, fmt, axis=-1).codes.expand(2, 3, 5, 20))


@pytest.mark.property("layouts")
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_more_dimensions_are_more_rows(fmt, side, twins, device):
    """Including dimensions that cannot be merged without a copy."""
    module = module_of(twins, side)
    x = ordinary(2, 1, 2, 4, 6).to(device)
    for view in (x, x.transpose(0, 2)):
        q = module.quantize(view, fmt, axis=-2, group=3)
        rows = module.quantize(view.flatten(0, 2), fmt, axis=-2, group=3)
        assert q.codes.shape == view.shape == q.shape
        assert torch.equal(q.codes.flatten(0, 2), rows.codes) and torch.equal(q.scales.flatten(0, 2), rows.scales)


# Groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.property("independence")
@every_format
@pytest.mark.parametrize("axis", (-1, -2))
def test_groups_are_independent(fmt, axis, side, twins, device):
    """The result of a group does not depend on the other groups. A short last group is also a group."""
    module = module_of(twins, side)
    x = ordinary(2, 21, 19).to(device)
    q = module.quantize(x, fmt, axis=axis, group=6)
    along = -2 if fmt == "fp8" else axis
    for start in (0, 6, 12, 18):
        poisoned = torch.full_like(x, NAN)
        poisoned[0] = INF
        part = x.narrow(along, start, min(6, x.shape[along] - start))
        poisoned.narrow(along, start, part.shape[along])[1] = part[1]
        alone, among = (module.quantize(tensor, fmt, axis=axis, group=6) for tensor in (part, poisoned))
        size = part.shape[along]
        for one in (among.codes[1], q.codes[1]):
            assert torch.equal(one.narrow(along, start, size), alone.codes[1])
        where = -1 if fmt == "fp8" else axis
        for one in (among.scales[1], q.scales[1]):
            assert torch.equal(one.narrow(where, start // 6, 1), alone.scales[1])


@pytest.mark.property("accuracy")
@every_format
def test_keys_by_channel_values_by_token(fmt, side, twins, device):
    """Axis -2 of a tensor is axis -1 of its transpose. For fp8, the axis has no effect."""
    module = module_of(twins, side)
    x = ordinary(2, 21, 40).to(device)
    keys, values = module.quantize(x, fmt, axis=-2), module.quantize(x, fmt, axis=-1)
    if fmt == "fp8":
        assert keys.scales.shape == (2, 2) and same(keys, values)
        assert torch.equal(keys.scales[:, 1], module.quantize(x[:, 16:], fmt, axis=-2).scales[:, 0])
    else:
        assert keys.scales.shape == (2, 2, 40) and values.scales.shape == (2, 21, 3)
        turned = module.quantize(x.mT, fmt, axis=-1)
        assert torch.equal(turned.codes.mT, keys.codes) and torch.equal(turned.scales.mT, keys.scales)
    assert (keys.axis, values.axis, keys.group, keys.fmt, keys.shape) == (-2, -1, 16, fmt, x.shape)


# Symmetries ----------------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@every_format
def test_signs_and_powers_of_two_pass_through(fmt, side, twins, device):
    module, half = module_of(twins, side), 1 << oracle.BITS[fmt] - 1
    x = ordinary(4, 32).to(device)
    q, mirrored, doubled = (module.quantize(x * factor, fmt, axis=-1) for factor in (1, -1, 4))
    assert torch.equal(mirrored.scales, q.scales)
    assert torch.equal(mirrored.codes, torch.where(q.codes > 0, q.codes ^ half, 0))
    assert torch.equal(doubled.codes, q.codes)
    assert scales_of(doubled) == [4 * scale for scale in scales_of(q)]


@pytest.mark.property("accuracy")
@pytest.mark.parametrize("fmt", by_group)
def test_what_was_quantized_stays_as_it_is(fmt, side, twins, device):
    """With normal scales, the largest element has the largest code, so a second quantization finds the same scale."""
    module = module_of(twins, side)
    x = (ordinary(64, 16, seed=3) * 2.0 ** torch.arange(-3, 5).repeat(8)[:, None]).to(device)
    q = module.quantize(x, fmt, axis=-1)
    assert min(scales_of(q)) >= 2**-6
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # codes times scales have few bits
        assert same(module.quantize(module.dequantize(q, dtype), fmt, axis=-1), q)


@pytest.mark.property("accuracy")
def test_int2_is_ternary(side, twins, device):
    module = module_of(twins, side)
    kinds = ("sizes", "halfway", "special")
    x = torch.stack([fill(kind, torch.Generator().manual_seed(1), (8, 32), "int2") for kind in kinds])
    assert same(*(module.quantize(x.to(device), fmt, axis=-1) for fmt in ("int2", "ternary")))


# Least squares -------------------------------------------------------------------------------------------------------


def squared_error(x: list[float], scale: float) -> Fraction:
    sizes = [abs(Fraction(number)) for number in x]
    return sum(((size - (Fraction(scale) if size > Fraction(scale) / 2 else 0)) ** 2 for size in sizes), Fraction(0))


@pytest.mark.property("accuracy")
def test_least_squares_choose_the_best_fraction(side, twins, device):
    module = module_of(twins, side)
    x = ordinary(40, 16, seed=5).to(device)
    q, plain = (module.quantize(x, "ternary", axis=-1, scale_rule=rule) for rule in ("mse", "amax"))
    better = 0
    for row, scale, largest in zip(x.tolist(), scales_of(q), scales_of(plain), strict=True):
        amax = torch.tensor(row).abs().max()
        among = [(amax * k / 16).to(torch.float8_e4m3fn).item() for k in range(8, 17)]
        assert scale in among
        assert squared_error(row, scale) == min(squared_error(row, other) for other in among)
        better += squared_error(row, scale) < squared_error(row, largest)
    assert better > 30
    assert same(module.quantize(x, "ternary", axis=-1), plain), "amax is the default"


@pytest.mark.property("accuracy")
def test_equal_squares_go_to_the_largest_fraction(side, twins, device):
    """1 and 15/16 have equal errors with the scales 1 and 15/16."""
    x = torch.tensor([[1.0, -0.9375]], device=device)
    assert squared_error([1.0, 0.9375], 1) == squared_error([1.0, 0.9375], 0.9375)
    assert scales_of(module_of(twins, side).quantize(x, "ternary", axis=-1, scale_rule="mse")) == [1.0]


# Compression ---------------------------------------------------------------------------------------------------------


@every_format
def test_quantization_saves_memory_and_loses_precision(fmt, side, twins, device):
    module = module_of(twins, side)
    x = ordinary(16, 64).bfloat16().to(device)
    q = module.quantize(x, fmt, axis=-1)
    packed = module.pack(q.codes, oracle.BITS[fmt])
    size = packed.nbytes + q.scales.nbytes
    assert size == {"fp8": 1024 + 4, "nvfp4": 512 + 64, "int4": 512 + 64, "ternary": 256 + 64, "int2": 256 + 64}[fmt]
    assert size < x.nbytes
    again = q._replace(codes=module.unpack(packed, oracle.BITS[fmt], 64))
    back = module.dequantize(again, torch.bfloat16)
    assert torch.equal(back, module.dequantize(q, torch.bfloat16))
    error = (back.double() - x.double()).abs().max() / x.double().abs().max()
    assert {"fp8": 0, "nvfp4": 0.02, "int4": 0.02, "ternary": 0.3, "int2": 0.3}[fmt] < error < 0.53
