"""KeyDiff's state, block by block: any block size, the peak memory, and a sum that is carried over many steps:
what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.key_cases import KeyCase
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same, gathered
from kvtwin.conformance.suite.keydiff.test_keydiff_state import HEAD_DIM, SIDES, both, held, made, tokens
from kvtwin.optimized import keydiff as optimized
from kvtwin.reference import keydiff
from kvtwin.reference.keydiff import KeyDiffConfig

pytestmark = [
    pytest.mark.kind("equivalence"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # see test_keydiff.py
]

few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


@SIDES
@pytest.mark.parametrize(("total", "budget", "recent"), [(40, 9, 0), (23, 22, 5), (12, 12, 3)])
def test_one_block_is_one_eviction(total, budget, recent, side, twins, device):
    """With a block size of at least T, the state keeps what `evict` keeps of the prompt's keys (KD-7)."""
    module = getattr(twins, side).keydiff
    query, key, value = tokens(device, total, seed=total, heads=2, dtype=torch.bfloat16)
    state = made(module, device, heads=2, dtype=torch.bfloat16, budget=budget, block_size=total + 3, recent=recent)
    state.prefill(query, key, value)
    case = KeyCase.of(key, value, budget=budget, recent=recent)
    kept = held(state)
    actual = keydiff.EvictResult(gathered(key, kept), gathered(value, kept), kept, kept >= 0)
    judge.assert_evict_right(actual, case)
    assert_same(kept, module.evict(**case.inputs).kept, what="positions held, against what evict keeps")


@SIDES
def test_blocks_of_one_are_decoding(side, twins, device):
    """append_block with blocks of one token and steps keep the same tokens and have the same outputs."""
    module = getattr(twins, side).keydiff
    query, key, value = tokens(device, 11, seed=3)
    blocks, steps = (made(module, device, budget=4, block_size=1, refresh=3) for _ in range(2))
    drivers = [
        lockstep.Lockstep(state, made(keydiff, device, budget=4, block_size=1, dtype=torch.float64), judge.Adapter())
        for state in (blocks, steps)
    ] if side == "optimized" else []
    if drivers:
        drivers[0].append_block(query, key, value)
        for token in range(11):
            drivers[1].step(query[:, :, token], key[:, :, token], value[:, :, token])
        assert all(driver.summary.adjudicated == 0 for driver in drivers)
    else:
        output = blocks.append_block(query, key, value)
        for token in range(11):
            one = steps.step(query[:, :, token], key[:, :, token], value[:, :, token])
            assert torch.equal(one, output[:, :, token])
    assert_same(steps.positions, blocks.positions, what="positions")
    for name in ("key", "value"):
        where = blocks.occupied[..., None]
        assert_same(getattr(steps, name), getattr(blocks, name), where=where, what=name)


@given(data=st.data())
@few
def test_keydiff_takes_blocks_of_any_size(data, twins, device):
    """Blocks, with or without padding, and steps, in any order."""
    budget, size = data.draw(st.integers(1, 8)), data.draw(st.integers(3, 12))
    run = both(
        twins, device, batch=2, dtype=data.draw(st.sampled_from((torch.float32, torch.bfloat16))),
        budget=budget, block_size=size, recent=data.draw(st.integers(0, budget)), refresh=2,
    )
    seed = data.draw(st.integers(0, 2**16))
    for number, count in enumerate(data.draw(st.lists(st.integers(0, 2 * size), min_size=2, max_size=4))):
        drawn = [
            torch.cat([part, part.flip(2)])
            for part in tokens(device, max(count, 1), seed=seed + number, dtype=run.tested.dtype)
        ]
        if not count:
            run.step(*(part[:, :, 0] for part in drawn))
            continue
        generator = torch.Generator(device).manual_seed(seed + number)
        padding = torch.rand(2, count, generator=generator, device=device) < data.draw(st.sampled_from((0.0, 0.4, 1.0)))
        run.append_block(*drawn, ~padding)


def test_the_peak_is_budget_and_block(twins, device):
    """KD-7: at most budget + block_size tokens per head, in buffers with as many slots. The peak is attained."""
    budget, size = 6, 4
    state = made(twins.optimized.keydiff, device, budget=budget, block_size=size)
    reference = made(keydiff, device, budget=budget, block_size=size)
    assert state.key.shape[2] == state.value.shape[2] == state.occupied.shape[-1] == budget + size
    peak = 0
    query, key, value = tokens(device, 30, seed=1)
    for start in range(0, 30, size):
        block = [part[:, :, start:start + size] for part in (query, key, value)]
        reference.append_block(*block)
        peak = max(peak, int(reference._before["occupied"].sum(-1).max()))
        assert int(reference.occupied.sum(-1).max()) == min(budget, reference.tokens_seen)
    state.append_block(query, key, value)
    assert state.key.shape[2] == budget + size
    assert int(state.occupied.sum(-1).max()) == budget
    assert peak == budget + size


@pytest.mark.parametrize("refresh", [1, 3])
def test_a_carried_sum_is_renewed(refresh, device):
    """Only for our own state: an error added to the sum is gone after `refresh` steps, and not before."""
    state = made(optimized, device, budget=6, block_size=8, refresh=refresh)
    query, key, value = tokens(device, 20, seed=8)
    state.prefill(*(part[:, :, :8] for part in (query, key, value)))
    for token in range(8, 8 + refresh):
        held_keys = judge.Keys(state.key[:, :, :6].double(), state.occupied[..., :6])
        if token == 8:
            state._anchor += 1.0
        error = (state._anchor[:, :, None] - held_keys.unit.sum(2, keepdim=True)).abs()
        assert float(error.min()) > 0.9
        state.step(query[:, :, token], key[:, :, token], value[:, :, token])
    held_keys = judge.Keys(state.key[:, :, :6].double(), state.occupied[..., :6])
    error = (state._anchor[:, :, None] - held_keys.unit.sum(2, keepdim=True)).abs()
    # The sum included the evicted key, which was then subtracted: at most as much error again.
    assert bool((error < 3 * held_keys.unit_sum_error.amax()).all())


@SIDES
def test_queries_decide_nothing(side, twins, device):
    """The same keys with other queries, and with more queries per KV head, keep the same tokens."""
    module = getattr(twins, side).keydiff
    _, key, value = tokens(device, 12, seed=9)
    kept = []
    for group in (1, 3):
        state = module.KeyDiffState(
            KeyDiffConfig(5, block_size=9), batch=1, query_heads=group, key_value_heads=1, head_dim=HEAD_DIM,
            dtype=torch.float32, device=device,
        )
        query, _, _ = tokens(device, 12, seed=group, heads=group)
        state.prefill(*(part[:, :, :9] for part in (query, key, value)))
        for token in range(9, 12):
            state.step(query[:, :, token], key[:, :, token], value[:, :, token])
        kept.append(state)
    assert_same(kept[1].positions, kept[0].positions, what="positions")
    assert_same(kept[1].score, kept[0].score, what="score")
