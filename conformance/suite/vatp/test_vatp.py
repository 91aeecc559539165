"""VATP under test: value norms can outweigh attention, zero values tie, and the first token is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.block_cases import with_spiked_values
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import state_traces
from kvtwin.conformance.judge import lockstep

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def new(module, device, budget, block, recent):
    return module.VATPState(
        module.VATPConfig(budget, block, recent), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )


@given(trace=state_traces("vatp", content=("ordinary", "equal_keys"), max_prompt=12, max_steps=6))
@few
def test_vatp_ranks_by_attention_times_size(trace, twins):
    """Flat values and spikes of all powers of two: ||v||_1 decides, not ||v||_2."""
    lockstep.run(with_spiked_values(trace), twins.optimized.baselines.vatp)


@pytest.mark.property("state")
@pytest.mark.parametrize(
    ("prompt", "steps", "budget"), [(0, 14, 6), (14, 0, 6), (80, 5, 70)], ids=["steps", "blocks", "chunks"]
)
def test_vatp_evicts_by_size_over_many_steps(prompt, steps, budget, twins, device):
    """H2O, ||v||_2 and the largest element would each choose differently nearly every time. Of 70 slots, a step ranks
    several chunks."""
    config = {"budget": budget, "block_size": budget // 2, "recent": 1}
    trace = StateTrace(
        method="vatp", group=2, prompt=prompt, steps=steps, config=tuple(config.items()), device=str(device), seed=9
    )
    lockstep.run(with_spiked_values(trace), twins.optimized.baselines.vatp)


@pytest.mark.property("state")
def test_vatp_sizes_go_with_their_rows(twins, device):
    """Rows with different value norms are reordered. After that, each row evicts by its own norms."""
    generator = torch.Generator().manual_seed(11)
    query, key, value = torch.randn(3, 2, 1, 14, 16, generator=generator)
    value *= torch.exp2(torch.randint(-5, 5, (2, 1, 14, 1), generator=generator).float())
    tokens = {name: x.to(device) for name, x in (("query", query), ("key", key), ("value", value))}
    both = lockstep.pair(
        "vatp", twins.optimized.baselines.vatp, config={"budget": 5, "block_size": 6, "recent": 1}, batch=2,
        query_heads=1, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device,
    )
    both.prefill(**{name: tensor[:, :, :6] for name, tensor in tokens.items()})
    both.reorder(torch.tensor([1, 0], device=device))
    for step in range(6, 14):
        both.step(**{name: tensor[:, :, step] for name, tensor in tokens.items()})


@given(trace=state_traces("vatp", content=("zero_values", "tiny_values"), max_prompt=12, max_steps=6))
@few
def test_vatp_of_tiny_values(trace, twins):
    lockstep.run(trace, twins.optimized.baselines.vatp)


@pytest.mark.property("ties", slots="fixed")
@SIDES
def test_vatp_evicts_values_of_zero_by_slot(side, twins, device):
    """All of them rank 0, whatever attention they receive, so the lowest slot except that of the first token is
    evicted."""
    state = new(getattr(twins, side).baselines.vatp, device, budget=4, block=1, recent=1)
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 1, 8, 16, generator=generator).to(device)
    value = torch.zeros_like(key)
    held = []
    for step in range(8):
        state.step(*(tensor[:, :, step] for tensor in (query, key, value)))
        held.append(state.positions[0, 0, :4].tolist())
    # The first and the newest token are protected. Slot 1 is evicted every time, as its token is no longer the newest.
    assert held[3:] == [[0, 1, 2, 3], [0, 4, 2, 3], [0, 5, 2, 3], [0, 6, 2, 3], [0, 7, 2, 3]]


@pytest.mark.property("decisions", slots="fixed")
@SIDES
def test_vatp_keeps_the_large_value_and_the_first_token(side, twins, device):
    """With equal keys, older tokens have larger sums, and only value norms differ. Token 0 has a zero value and is
    kept."""
    state = new(getattr(twins, side).baselines.vatp, device, budget=3, block=8, recent=1)
    zeros = torch.zeros(1, 1, 8, 16, device=device)
    value = torch.full_like(zeros, 0.01)
    value[0, 0, 0], value[0, 0, 5] = 0, 100
    state.prefill(zeros, zeros, value)
    assert state.positions[0, 0, :3].tolist() == [0, 5, 7]


@pytest.mark.property("decisions", slots="fixed")
@SIDES
def test_vatp_of_one_slot_keeps_the_first_token(side, twins, device):
    state = new(getattr(twins, side).baselines.vatp, device, budget=1, block=2, recent=None)
    generator = torch.Generator().manual_seed(2)
    state.prefill(*torch.randn(3, 1, 1, 5, 16, generator=generator).to(device))
    assert state.positions[0, 0].tolist() == [0, -1, -1]


@given(recent=st.integers(0, 3))
@few
def test_vatp_score_is_the_sum_of_weights_alone(recent, twins, device):
    """The value norm affects the rank, not the score: the score is the same for other values."""
    module = twins.optimized.baselines.vatp
    generator = torch.Generator().manual_seed(recent)
    query, key, value = torch.randn(3, 1, 1, 4, 16, generator=generator).to(device)
    one, other = (new(module, device, 4, 4, recent) for _ in range(2))
    one.prefill(query, key, value)
    other.prefill(query, key, 8 * value)
    assert torch.equal(one.score, other.score)


@pytest.mark.property("decisions")
@SIDES
@pytest.mark.parametrize("how", ("steps", "block"))
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_vatp_keeps_the_first_tokens_although_their_values_are_zero(side, how, sinks, twins, device):
    """Attention sinks have small values, so they rank last. Sinks stay; of the others, the tokens with the largest
    values do."""
    module = getattr(twins, side).baselines.vatp
    state = module.VATPState(
        module.VATPConfig(6, 12, recent=1, sinks=sinks), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    query = torch.zeros(1, 1, 12, 16, device=device)
    value = torch.exp2(3.0 * torch.arange(12, device=device)).flip(0)[None, None, :, None].expand(1, 1, 12, 16).clone()
    value[0, 0, :4] = 0
    if how == "steps":
        for token in range(12):
            state.step(*(tensor[:, :, token] for tensor in (query, query, value)))
    else:
        state.prefill(query, query, value)
    assert sorted(state.positions[0, 0, :6].tolist()) == [*range(sinks), *range(4, 9 - sinks), 11]


@pytest.mark.property("state")
@pytest.mark.parametrize(("prompt", "steps"), [(0, 21), (21, 3)], ids=["steps", "blocks"])
def test_vatp_evicts_by_size_at_intervals(prompt, steps, twins, device):
    """Value norms move with the tokens that an eviction moves, several at once, and decide at the next one."""
    config = {"budget": 5, "block_size": 4, "recent": 1, "interval": 3}
    trace = StateTrace(
        method="vatp", group=2, prompt=prompt, steps=steps, config=tuple(config.items()), device=str(device), seed=9
    )
    lockstep.run(with_spiked_values(trace), twins.optimized.baselines.vatp)
