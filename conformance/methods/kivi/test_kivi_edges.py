"""KIVI at the edges: prompts about as long as the residual, groups of half a word, rooms that the residual does not
divide, numbers that a narrow type cannot hold, and calls that are refused: what only our own sides promise.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.kivi.test_kivi_edges import SMALL, new_state, token, tokens

pytestmark = pytest.mark.kind("equivalence")


def signed(tensor: Tensor) -> Tensor:
    """The bits of numbers, so that -0 and 0 differ, with NaN as 0."""
    if not tensor.is_floating_point():
        return tensor
    integers = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.nan_to_num(0, torch.inf, -torch.inf).contiguous().view(integers)


@pytest.mark.parametrize("count", [15, 16, 17, 31, 32, 33])
def test_a_prompt_about_as_long_as_the_residual_keeps_step(count, twins, device):
    trace = StateTrace(
        method="kivi", config=tuple({**SMALL, "max_tokens": 48}.items()), head_dim=16, prompt=count, steps=2, seed=1,
        device=str(device),
    )
    lockstep.run(trace, twins.optimized.baselines.kivi)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(2, 8), (4, 4)])
def test_groups_of_half_a_word_have_their_own_scales(bits, group, dtype, twins, device):
    options = {"key_bits": bits, "value_bits": bits, "group": group, "max_tokens": 48}
    trace = StateTrace(
        method="kivi", config=tuple({**SMALL, **options}.items()), head_dim=32, group=2, dtype=dtype, prompt=40,
        steps=2, seed=1, device=str(device),
    )
    lockstep.run(trace, twins.optimized.baselines.kivi)


@pytest.mark.parametrize("slots", [30, 16, 10, 1])
def test_there_is_room_for_what_can_be_quantized(slots, twins, device):
    """The residual does not divide max_tokens, or is as long or longer."""
    reference, optimized = (new_state(side, device, max_tokens=slots) for side in (twins.reference, twins.optimized))
    for name in ("codes_of_keys", "codes_of_values"):
        for one, other in zip(getattr(optimized, name)(), getattr(reference, name)(), strict=True):
            assert_same(one, other, what=name)
    assert_same(optimized.value, reference.value, what="value")


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("number", "dtype"), [
    (lambda: torch.full((1, 1, 16, 16), -70000.0), torch.float16),
    (lambda: torch.full((1, 1, 16, 16), -30000.0).index_fill(2, torch.tensor([0, 7]), 200000.0)
     .index_fill(3, torch.tensor([0, 7]), 200000.0), torch.float16),
    (lambda: torch.full((1, 1, 16, 16), -0.0), torch.float32),
    (lambda: torch.linspace(0, 3e-39, 256).view(1, 1, 16, 16), torch.float32),
], ids=["minimum beyond float16", "scale beyond float16", "minus zero", "subnormal scales"])
def test_both_sides_store_the_same_bits_at_the_ends_of_a_type(number, dtype, axis, twins, device):
    kept = {"bits": 2, "axis": axis, "group": 16, "dtype": dtype}
    x = number().to(device)
    found, expected = (side.baselines.kivi.quantize(x, **kept) for side in (twins.optimized, twins.reference))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert_same(signed(one), signed(other), what="quantize")


@pytest.mark.limits
@pytest.mark.parametrize("axis", [-1, -2])
def test_the_largest_group(axis, twins, device):
    shape = (1, 1, 16, 1024) if axis == -1 else (1, 1, 1024, 16)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)
    found, expected = (
        side.baselines.kivi.quantize(x, bits=2, axis=axis, group=1024) for side in (twins.optimized, twins.reference)
    )
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, what="quantize")


@pytest.mark.parametrize("part", ["codes", "scale", "minimum"])
def test_each_part_is_read_by_its_own_strides(part, twins, device):
    x = torch.randn(1, 2, 16, 32, generator=torch.Generator().manual_seed(3)).to(device)
    options = {"bits": 2, "axis": -1, "group": 16}
    parts = twins.reference.baselines.kivi.quantize(x, **options)._asdict()
    expected = twins.reference.baselines.kivi.dequantize(**parts, **options)
    parts[part] = parts[part].mT.contiguous().mT
    assert not parts[part].is_contiguous()
    assert_same(twins.optimized.baselines.kivi.dequantize(**parts, **options), expected, what="dequantize")


def test_a_mean_of_the_largest_float16_is_finite(twins, device):
    """float16 rounds the weights of the last 19 tokens up, by almost 2^-11."""
    scale = -math.log(0.5 * (1 + 2**-11 + 2**-14))
    state = new_state(twins.optimized, device, dtype=torch.float16, group=16, residual=32, max_tokens=64, scale=scale)
    query, key = (torch.zeros(1, heads, 20, 16, dtype=torch.float16, device=device) for heads in (2, 1))
    query[..., 0], key[:, :, 1:, 0] = 1, -1
    value = torch.full_like(key, 65504.0)
    state.prefill(query, key, value)
    assert bool(state.step(query[:, :, 0], key[:, :, 1], value[:, :, 0]).isfinite().all())


def test_a_token_beyond_the_room_changes_nothing_beside_padding(twins, device):
    """As in the replay of a graph, which the host does not count."""
    state = new_state(twins.optimized, device, batch=2)
    if not hasattr(state, "_counted"):
        pytest.skip("counts tokens on the host in an attribute of kvtwin's own state, `_counted`")
    occupied = torch.ones(2, 20, dtype=torch.bool, device=device)
    occupied[0, :3] = False
    state.prefill(*tokens(device, 20, batch=2), occupied)
    before = [tensor.clone() for tensor in (state.positions, state.key, state.value, state.keys_quantized)]
    state._counted -= 1
    state.step(*token(device, batch=2))
    assert state.tokens_seen == 20
    for one, other in zip((state.positions, state.key, state.value, state.keys_quantized), before, strict=True):
        assert_same(one, other, what="the state")


@pytest.mark.kind("bad_input")
@pytest.mark.limits
def test_kernels_refuse_to_dequantize_to_float64(twins, device):
    x = torch.randn(1, 1, 16, 16, device=device)
    options = {"bits": 2, "axis": -1, "group": 16}
    parts = twins.optimized.baselines.kivi.quantize(x, **options)
    with pytest.raises(TypeError, match="float64"):
        twins.optimized.baselines.kivi.dequantize(*parts, **options, dtype=torch.float64)
