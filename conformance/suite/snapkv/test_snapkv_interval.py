"""SnapKV with an interval: when a head is compressed, its scores in between, and the cost of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized.baselines import snapkv as optimized

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 8))
HEADS, HEAD_DIM = 1, 16


def new(module, device, batch=2, **config):
    return module.SnapKVState(
        module.SnapKVConfig(**{"window": 2, "kernel_size": 3, **config}), batch=batch, query_heads=2 * HEADS,
        key_value_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32, device=device,
    )


def tokens(count, generator, device, batch=2):
    """query [B, Hq, count, D], key and value [B, Hkv, count, D]."""
    return [torch.randn(batch, heads, count, HEAD_DIM, generator=generator).to(device)
            for heads in (2 * HEADS, HEADS, HEADS)]


@pytest.mark.property("state", slots="fixed")
@SIDES
@given(budget=st.integers(1, 6), interval=st.integers(2, 5), block=st.integers(1, 5), seed=st.integers(0, 2**31))
@example(budget=2, interval=3, block=4, seed=0)  # one head evicts while the other has one token too few
@few
def test_a_head_evicts_when_it_holds_budget_and_interval(side, budget, interval, block, seed, twins, device):
    """Two rows, one with padding, counted by hand. A head with budget + interval tokens or more evicts down to the
    budget. A head with fewer keeps its tokens, slots and scores, and new tokens score +inf."""
    generator = torch.Generator().manual_seed(seed)
    state = new(getattr(twins, side).baselines.snapkv, device, budget=budget, interval=interval, block_size=block)
    held = [0, 0]
    for count in (block, block, 1, 1, block):
        given_ = tokens(count, generator, device)
        real = torch.ones(2, count, dtype=torch.bool, device=device)
        real[1, :count // 2] = False
        before, score = state.positions.clone(), state.score.clone()
        if count == 1:
            state.step(*(tensor[:, :, 0] for tensor in given_))
        else:
            state.append_block(*given_, real)
        for row in range(2):
            came = held[row] + int(real[row].sum())
            held[row] = budget if came >= budget + interval else came
            assert state.occupied[row].sum(-1).tolist() == [held[row]] * HEADS
            assert bool(state.occupied[row, :, :held[row]].all()), "the tokens must have no gaps between them"
            if held[row] == came:
                old = before[row] >= 0
                assert_same(state.positions[row][old], before[row][old], what="tokens of a head that evicts nothing")
                assert_same(state.score[row][old], score[row][old], what="scores of a head that evicts nothing")
                assert bool((state.score[row][state.occupied[row] & ~old] == torch.inf).all())
            else:
                newest = state.positions[row] >= state.tokens_seen - state.config.observers
                ranked = state.score[row][state.occupied[row] & ~newest]
                assert bool(torch.isfinite(ranked).all()), "all kept tokens must be ranked"


@SIDES
def test_an_interval_of_one_is_the_default(side, twins, device):
    """With a longer interval, the first compression keeps the same tokens as without one."""
    module, generator = getattr(twins, side).baselines.snapkv, torch.Generator().manual_seed(4)
    given_ = tokens(9, generator, device)
    one, plain, several = (
        new(module, device, budget=4, block_size=9, **options) for options in ({"interval": 1}, {}, {"interval": 5})
    )
    for state in (one, plain, several):
        state.prefill(*given_)
    assert one.key.shape == plain.key.shape and several.key.shape[2] == plain.key.shape[2] + 4
    for name in ("positions", "score"):
        assert_same(getattr(one, name), getattr(plain, name), what=name)
    assert_same(several.positions[..., :4], plain.positions[..., :4], what="positions")


@pytest.mark.property("state")
@pytest.mark.parametrize("options", [
    {"budget": 139, "interval": 7, "block_size": 50, "window": 9, "kernel_size": 5, "prompt": 147},
    {"budget": 3, "interval": 140, "block_size": 70, "window": 2, "kernel_size": 3, "prompt": 139},
], ids=["budget", "interval"])
def test_many_slots(options, twins, device):
    """More slots than a chunk of the kernels, in the budget or in the interval, and steps beyond a compression."""
    config = {name: value for name, value in options.items() if name != "prompt"}
    trace = StateTrace(
        method="snapkv", config=tuple(config.items()), batch=1, key_value_heads=1, group=2, prompt=options["prompt"],
        steps=7 if options["budget"] > 100 else 5, seed=5, device=str(device),
    )
    summary = lockstep.run(trace, twins.optimized.baselines.snapkv)
    assert summary.decisive >= 1


@pytest.mark.property("state")
def test_the_pool_follows_tokens_that_have_moved(twins, device):
    """Each compression moves tokens to other slots. The next one pools their scores in the order of arrival."""
    trace = StateTrace(
        method="snapkv", config=(("budget", 12), ("interval", 3), ("block_size", 5), ("window", 2), ("kernel_size", 5)),
        batch=2, key_value_heads=2, group=2, prompt=20, steps=14, seed=6, device=str(device),
    )
    summary = lockstep.run(trace, twins.optimized.baselines.snapkv)
    assert summary.decisive >= 8


# Our own kernels, for any implementation under test ---------------------------------------------------------------


def test_heads_that_are_not_due_cost_no_observation(device):
    """No launch writes their scratch memory. That of the compressed row is written."""
    generator = torch.Generator().manual_seed(8)
    state = new(optimized, device, budget=3, interval=4, block_size=6)
    real = torch.ones(2, 6, dtype=torch.bool, device=device)
    real[1, :2] = False
    state.append_block(*tokens(6, generator, device), real)                         # 6 and 4 tokens; at most 6 are kept
    parts, received, numbers = state._between
    parts.fill_(-7)
    received.fill_(-7)
    numbers.fill_(-7)
    state.step(*(tensor[:, :, 0] for tensor in tokens(1, generator, device)))
    assert state.occupied.sum(-1).tolist() == [[3] * HEADS, [5] * HEADS]
    end = state.config.capacity + 1
    received = received[:2 * HEADS * end].view(2, HEADS, end)
    numbers = numbers.view(4, 2, HEADS, -1)
    for name, row, tensor in (
        ("parts", 1, parts), ("received", 0, received), ("slots in turn", 0, numbers[0]), ("ranks", 0, numbers[1]),
        ("fates", 0, numbers[3]),
    ):
        due, other = tensor.select(row, 0), tensor.select(row, 1)
        assert bool((due[..., :2] != -7).any()), f"{name} of a compressed row must be written"
        assert bool((other == -7).all()), f"{name} of a row that is not compressed must not be written"
    state.step(*(tensor[:, :, 0] for tensor in tokens(1, generator, device)))
    assert bool((parts[:, 1] == -7).all()), "nothing must be written if no row is due"
