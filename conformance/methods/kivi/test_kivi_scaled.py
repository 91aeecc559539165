"""KIVI's bfloat16 numbers times 2^-16, and heads whose scales or minima are too large or too small for that.

A scale has to be 0 or from 2^-103 to below 2^11, a minimum 0 or at least 2^-103 in size. For other heads, a step
computes the numbers themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.checkers import kivi as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.quantized_states import checked_step
from kvtwin.optimized.baselines import kivi as ours

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.first]

BATCH, HEADS, GROUP_HEADS, RESIDUAL = 2, 2, 3, 32
BF16 = torch.bfloat16
long = pytest.mark.slow_on_cpu
#: Of a group with 2 bits: its least and its greatest number, and whether its scale or its minimum is too large or too
#: small. The greatest of a scale of 255 * 2^n is 764 * 2^n: a third of it rounds to that scale.
GROUPS = [
    pytest.param(0.0, 3 * 2.0**-103, False, id="least-scale"),
    pytest.param(0.0, 764 * 2.0**-111, True, id="scale-below-the-least"),
    pytest.param(0.0, 764 * 2.0**3, False, id="largest-scale"),
    pytest.param(0.0, 3 * 2.0**11, True, id="scale-above-the-largest"),
    pytest.param(2.0**-103, 2.0**-103, False, id="least-minimum"),
    pytest.param(-(2.0**-103), 2.0**-101, False, id="least-negative-minimum"),
    pytest.param(255 * 2.0**-111, 255 * 2.0**-111, True, id="minimum-below-the-least"),
    pytest.param(-255 * 2.0**-111, -255 * 2.0**-111, True, id="negative-minimum-below-the-least"),
    pytest.param(2.0**12, 2.0**12 + 3 * 2.0**11, True, id="scale-of-positive-numbers-above-the-largest"),
    pytest.param(-6112.0, 24.0, True, id="scale-that-rounds-to-2-to-the-11"),
    pytest.param(-(2.0**121), -(2.0**121), False, id="large-minimum"),
]


def new_state(
    kivi: Any, device: torch.device, bits: int, *, head_dim: int = 128, group_heads: int = GROUP_HEADS,
    value_bits: int | None = None,
) -> Any:
    config = kivi.KIVIConfig(bits, value_bits or bits, group=16, residual=RESIDUAL, max_tokens=176)
    return kivi.KIVIState(
        config, batch=BATCH, query_heads=HEADS * group_heads, key_value_heads=HEADS, head_dim=head_dim, dtype=BF16,
        device=device,
    )


def tokens(
    count: int, device: torch.device, *, head_dim: int = 128, group_heads: int = GROUP_HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of random tokens."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(BATCH, heads, count, head_dim, generator=generator).to(device, BF16)
        for heads in (HEADS * group_heads, HEADS, HEADS)
    )
    return query, key, value


def one_group(low: float, high: float, quantized: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """51 tokens. In the first head of the last row, the keys 16 to 31, the second group of a residual, have a channel
    with these extremes, or the value of token 1 a group. That channel adds up to 2.8 to a logit."""
    query, key, value = tokens(51, device)
    if quantized == "keys":
        query[..., 5] = 32 / max(abs(low), abs(high))
        key[..., 5] = 0
        key[-1, 0, 16:32, 5] = low
        key[-1, 0, 20, 5] = high
    else:
        value[-1, 0, 1, 32:48] = low
        value[-1, 0, 1, 40] = high
    return query, key, value


@pytest.mark.parametrize("quantized", ["keys", "values"])
@pytest.mark.parametrize("prompt", [34, pytest.param(31, marks=long)])
@pytest.mark.parametrize(("low", "high", "extreme"), GROUPS)
def test_extreme_groups_are_noticed(low, high, extreme, prompt, quantized, device):
    """In a prompt, and in the steps that quantize them. Only in their head."""
    given = one_group(low, high, quantized, device)
    state = new_state(ours, device, 2)
    state.prefill(*(tensor[:, :, :prompt] for tensor in given))
    for number in range(prompt, 35):
        state.step(*(tensor[:, :, number] for tensor in given))
    assert state._extreme.tolist() == [[0, 0], [int(extreme), 0]]


@pytest.mark.parametrize("quantized", ["keys", "values"])
@pytest.mark.parametrize(("bits", "group", "residual"), [(2, 16, 32), (4, 64, 64), (2, 128, 128)])
def test_extreme_groups_are_noticed_at_every_place(bits, group, residual, quantized, device):
    """Of 32 heads, each has one extreme number: another channel of the keys, or another token of the values."""
    config = ours.KIVIConfig(bits, bits, group=group, residual=residual, max_tokens=2 * residual)
    state = ours.KIVIState(
        config, batch=8, query_heads=4, key_value_heads=4, head_dim=128, dtype=BF16, device=device,
    )
    generator = torch.Generator().manual_seed(5)
    given = torch.randn(3, 8, 4, residual + 32, 128, generator=generator).to(device, BF16)
    for number in range(32):
        of_head = given[1 if quantized == "keys" else 2, number // 4, number % 4]
        if quantized == "keys":
            of_head[number % residual, 37 * number % 128] = 2.0**16
        else:
            of_head[number, 16 * number % 128] = 2.0**16
    state.prefill(*given)
    assert bool(state._extreme.all())


@pytest.mark.parametrize("quantized", ["keys", "values"])
@pytest.mark.parametrize(("low", "high", "extreme"), GROUPS)
def test_steps_over_extreme_groups_are_within_the_bound(low, high, extreme, quantized, twins, device):
    given = one_group(low, high, quantized, device)
    state = new_state(twins.optimized.baselines.kivi, device, 2)
    state.prefill(*(tensor[:, :, :50] for tensor in given))             # the values of 18 tokens are quantized
    checked_step(judge, state, tuple(tensor[:, :, 50] for tensor in given), BATCH)


@pytest.mark.parametrize("quantized", ["keys", "values"])
@pytest.mark.parametrize(("bits", "value_bits", "head_dim", "group_heads"), [
    (4, 4, 128, 8), pytest.param(4, 4, 64, 3, marks=long), pytest.param(2, 4, 64, 8, marks=long),
    pytest.param(4, 2, 128, 1, marks=long),
])
@pytest.mark.parametrize("prompt", [161, pytest.param(159, marks=long)])
def test_the_last_groups_are_noticed_and_read(prompt, bits, value_bits, head_dim, group_heads, quantized, device):
    """Those of the last channels. With 4 bits they are in the third tile, which a later share has."""
    given = tokens(162, device, head_dim=head_dim, group_heads=group_heads)
    if quantized == "keys":
        given[1][0, 1, 128:144, -1] = torch.linspace(0, 2.0**18, 16)
        given[0][..., -1] = 2.0**-13
    else:
        given[2][0, 1, 128, -16:] = torch.linspace(0, 2.0**18, 16)
    state = new_state(ours, device, bits, value_bits=value_bits, head_dim=head_dim, group_heads=group_heads)
    state.prefill(*(tensor[:, :, :prompt] for tensor in given))
    for number in range(prompt, 161):
        state.step(*(tensor[:, :, number] for tensor in given))
    checked_step(judge, state, tuple(tensor[:, :, 161] for tensor in given), BATCH)
    assert state._extreme.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(("bits", "head_dim"), [(2, 128), (4, 128), pytest.param(4, 64, marks=long)])
def test_scaled_numbers_give_the_same_bits(bits, head_dim, device):
    """As the numbers themselves, with scales and minima of 2^-40 to 2^10."""
    query, key, value = tokens(165, device, head_dim=head_dim)
    size = torch.linspace(-38, 9, head_dim, device=device).round().exp2()
    key, value, query = (key * size).to(BF16), (value * size).to(BF16), (query / size).to(BF16)
    outputs = []
    for extreme in (0, 1):
        state = new_state(ours, device, bits, head_dim=head_dim)
        state.prefill(*(tensor[:, :, :163] for tensor in (query, key, value)))
        assert not bool(state._extreme.any())
        state._extreme.fill_(extreme)
        outputs.append(torch.stack([
            state.step(*(tensor[:, :, number] for tensor in (query, key, value))) for number in (163, 164)
        ]))
    assert bool(outputs[0].isfinite().all())
    assert_same(outputs[1], outputs[0], what="output")


@pytest.mark.parametrize("bits", [2, 4])
def test_a_weight_of_2_to_the_minus_112_counts(bits, twins, device):
    """All values are 0 but one, which is 1. Its weight times 2^-16 is a subnormal float32."""
    query, key, value = (torch.zeros_like(tensor) for tensor in tokens(150, device))
    query += 1
    key += 8
    key[:, :, 70] = 1.125                                               # a logit less by 6.875 * 128 / sqrt(128) = 77.8
    value[:, :, 70] = 1
    state = new_state(twins.optimized.baselines.kivi, device, bits)
    state.prefill(*(tensor[:, :, :149] for tensor in (query, key, value)))
    output = checked_step(judge, state, tuple(tensor[:, :, 149] for tensor in (query, key, value)), BATCH)
    assert bool((output > 2.0**-120).all()) and bool((output < 2.0**-110).all())


def test_extreme_groups_are_forgotten_and_reordered(device):
    given = one_group(0.0, 2.0**20, "keys", device)
    given[1][-1, 1, 3, 7] = 2.0**20
    state = new_state(ours, device, 2)
    for index in ([1, 0], [1, 1]):
        state.prefill(*given)
        state.reorder(torch.tensor(index, device=device))
        assert state._extreme.tolist() == [[row, row] for row in index]
        checked_step(judge, state, tuple(tensor[index, :, 0] for tensor in given), BATCH)
        state.reset()
        assert not bool(state._extreme.any())
