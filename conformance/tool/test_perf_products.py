"""Matrix products of one row, from the kernel of the headline experiments, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from kvtwin.conformance.tool.perf_source import PERF, perf_module

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

base, decoder, products = (perf_module(f"headline.{name}") for name in ("base", "decoder", "products"))

#: Rounding of float32.
UNIT = 2.0**-24


def drawn(device, *shape, dtype=torch.float32):
    generator = torch.Generator(device).manual_seed(7)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def exact_product(x, weight, norm):
    """RMSNorm of x, times weight, in float64, and the error bound of a float32 sum of these terms."""
    inner = x.shape[1]
    x = x.double()
    if norm:
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    terms = x.abs() @ weight.double().abs()
    # In any order, a sum of K products has K roundings of the terms' magnitudes. The sum of squares in the norm has as
    # many, relative to itself, which the root halves. Mean, root and scale add six more.
    return x @ weight.double(), (inner + (inner / 2 + 6 if norm else 0)) * UNIT * terms * 1.01


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("inner", [24, 4096, 6144, 5000], ids=["short", "whole", "in parts", "with a rest"])
def test_a_product_of_one_row_is_the_product(device, inner, norm):
    x, weight = drawn(device, 1, inner), drawn(device, 6, inner).t()
    exact, slack = exact_product(x, weight, norm)
    found = products.one_row(x, weight, norm=norm)
    assert found.shape == (1, 6)
    assert bool(((found - exact).abs() <= slack + UNIT * exact.abs()).all())

    residual = drawn(device, 1, 6) * 100
    found = products.one_row(x, weight, norm=norm, residual=residual)
    assert bool(((found - exact - residual.double()).abs() <= slack + UNIT * (2 * exact.abs() + residual.abs())).all())


def test_a_gated_product_is_the_gate_times_the_rest(device):
    x, weight = drawn(device, 1, 48), drawn(device, 20, 48).t()
    exact, slack = exact_product(x, weight, norm=True)
    gate, rest = exact.chunk(2, -1)
    gate_slack, rest_slack = slack.chunk(2, -1)
    # The derivative of silu is below 1.1. Exponential, quotient and product have errors below 2 ** -20 of the result.
    allowed = 1.1 * gate_slack * (rest.abs() + rest_slack) + silu(gate).abs() * rest_slack
    found = products.one_row(x, weight, norm=True, gated=True)
    assert bool(((found - silu(gate) * rest).abs() <= allowed + (silu(gate) * rest).abs() * 2.0**-20).all())


def test_a_product_takes_one_row_and_a_transposed_matrix(device):
    weight, apart = drawn(device, 6, 8), drawn(device, 1, 16)[:, ::2]
    for x, matrix in ((drawn(device, 2, 8), weight.t()), (drawn(device, 1, 6), weight), (apart, weight.t())):
        with pytest.raises(ValueError, match="x must be a contiguous row of"):
            products.one_row(x, matrix)
    with pytest.raises(ValueError, match="residual must be"):
        products.one_row(drawn(device, 1, 8), weight.t(), residual=apart[:, :6])


def test_decoder_agrees_for_one_row_and_two(device, tmp_path):
    """One row uses other kernels. They may differ by rounding errors, which are much smaller than the differences
    between tokens."""
    run = base.Run("test", tmp_path, str(device), tiny=True)
    made = decoder.Decoder(decoder.small(decoder.QWEN_8B), run, 8)
    made.layers = [type(layer)(*(part.float() for part in layer)) for layer in made.layers]
    made.embedding, made.head, made.norm, made.head_norm = (
        tensor.float() for tensor in (made.embedding, made.head, made.norm, made.head_norm)
    )

    def attend(_, query, key, value):
        return query * key.mean((1, 2, 3), keepdim=True) + value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    position, ids = torch.tensor([3], device=run.device), torch.tensor([[5], [11]], device=run.device)
    both, [kept] = made.forward(ids, position, attend, keep=[0])
    apart = (kept[0] - kept[1]).norm()
    for row in range(2):
        alone, [one] = made.forward(ids[row:row + 1], position, attend, keep=[0])
        assert int(alone) == int(both[row])
        assert float((one[0] - kept[row]).norm()) < 2**-12 * float(apart)
