"""StreamingLLM under test: only positions decide, so results are exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.judge.compare import assert_same

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def stays(positions: list[int], budget: int, sinks: int) -> set[int]:
    """The first `sinks` and the newest of the rest, from a plain list."""
    ordered = sorted(position for position in positions if position >= 0)
    return set(ordered[:sinks]) | set(ordered[max(sinks, len(ordered) - (budget - sinks)):])


@SIDES
@given(data=st.data())
def test_streaming_llm_keeps_the_first_and_the_newest(side, data, twins, device):
    """For positions in any order, with gaps and free slots."""
    slots, budget = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12))
    sinks = data.draw(st.integers(0, budget - 1))
    rows = data.draw(st.lists(
        st.lists(st.integers(-1, 40), min_size=slots, max_size=slots).map(
            lambda row: [p if p not in row[:place] else -1 for place, p in enumerate(row)]
        ), min_size=2, max_size=2,
    ))
    positions = torch.tensor(rows, device=device)[:, None]                                # [2, 1, S]
    kept = getattr(twins, side).baselines.streaming_llm.keep(positions, budget, sinks=sinks)
    expected = [[[p in stays(row, budget, sinks) and p >= 0 for p in row]] for row in rows]
    assert kept.dtype == torch.bool and kept.tolist() == expected


@SIDES
@given(
    budget=st.integers(1, 6), sinks=st.integers(0, 3), block=st.integers(1, 5), count=st.integers(1, 12),
    padding=st.lists(st.integers(0, 11), max_size=4),
)
@example(budget=4, sinks=2, block=3, count=9, padding=[0, 2])
@few
def test_streaming_llm_holds_the_same_whatever_the_blocks(side, budget, sinks, block, count, padding, twins, device):
    """After any prompt, with padding anywhere, the cache holds its first valid tokens and its newest. Sinks are in the
    first slots, in order."""
    sinks = min(sinks, budget - 1)
    module = getattr(twins, side).baselines.streaming_llm
    state = module.StreamingLLMState(
        module.StreamingLLMConfig(budget, block, sinks), batch=2, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    tokens = torch.randn(3, 2, 1, count, 16, generator=torch.Generator().manual_seed(count)).to(device)
    occupied = torch.ones(2, count, dtype=torch.bool, device=device)
    occupied[1, [token for token in padding if token < count]] = False
    state.prefill(*tokens, occupied)
    for row in range(2):
        real = occupied[row].nonzero()[:, 0].tolist()
        held = [position for position in state.positions[row, 0].tolist() if position >= 0]
        assert set(held) == stays(real, budget, sinks)
        assert held[:sinks] == real[:sinks]
    assert_same(state.score, torch.where(state.occupied, 0.0, -torch.inf), what="score")


@SIDES
def test_streaming_llm_ages_go_with_their_rows(side, twins, device):
    """Rows whose tokens have different ages are reordered, and continue as before."""
    module = getattr(twins, side).baselines.streaming_llm
    state = module.StreamingLLMState(
        module.StreamingLLMConfig(4, block_size=4, sinks=1), batch=2, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    occupied = torch.tensor([[True] * 4, [False, False, True, True]], device=device)
    state.prefill(*torch.ones(3, 2, 1, 4, 16, device=device), occupied)
    real = [[0, 1, 2, 3], [2, 3]]
    for step in range(4, 12):
        if step == 7:
            state.reorder(torch.tensor([1, 0], device=device))
            real.reverse()
        state.step(*torch.ones(3, 2, 1, 16, device=device))
        for row, tokens in enumerate(real):
            tokens.append(step)
            held = state.positions[row, 0, :4]
            assert set(held[held >= 0].tolist()) == stays(tokens, 4, 1), f"row {row} after token {step}"


@SIDES
def test_streaming_llm_decodes_around_its_sinks(side, twins, device):
    """The slots after the sinks are a ring buffer: the newest token takes the slot of the oldest that is not a sink."""
    module = getattr(twins, side).baselines.streaming_llm
    state = module.StreamingLLMState(
        module.StreamingLLMConfig(4, block_size=3, sinks=2), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    token = torch.ones(3, 1, 1, 16, device=device)
    seen = []
    for _ in range(7):
        state.step(*token)
        seen.append(state.positions[0, 0, :4].tolist())
    assert seen == [
        [0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3], [0, 1, 4, 3], [0, 1, 4, 5], [0, 1, 6, 5],
    ]
