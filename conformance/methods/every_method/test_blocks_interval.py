"""Block caches with an interval: when a head evicts, on many slots, and at what cost. SnapKV, which computes its scores
when it evicts, has its own tests of this."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference.blocks import BlockState

METHODS = [
    pair for pair in discovery.methods()
    if issubclass(pair.state or object, BlockState) and pair.name != "snapkv"
    and "interval" in {field.name for field in dataclasses.fields(pair.config)}
]
pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.parametrize("pair", METHODS, ids=str)]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 8))


def new(pair, module, device, **options):
    """A state with two rows of one KV head."""
    own = {name: value for name, value in checkers.ask(pair.name, "SMALL", {}).items() if name != "block_size"}
    return getattr(module, pair.state.__name__)(
        pair.config(**own, **options), batch=2, query_heads=2, key_value_heads=1, head_dim=16, dtype=torch.float32,
        device=device,
    )


def tokens(count, generator, device):
    """query [B, Hq, count, D], key and value [B, Hkv, count, D]."""
    return [torch.randn(2, heads, count, 16, generator=generator).to(device) for heads in (2, 1, 1)]


def feed(state, given_, real=None):
    if given_[0].shape[2] == 1:
        state.step(*(tensor[:, :, 0] for tensor in given_))
    else:
        state.append_block(*given_, real)


@SIDES
@given(budget=st.integers(1, 6), interval=st.integers(1, 5), block=st.integers(2, 5), seed=st.integers(0, 2**31))
@example(budget=2, interval=3, block=4, seed=0)  # one row evicts while the other has one token too few
@example(budget=3, interval=2, block=2, seed=0)  # a step evicts
@few
def test_a_head_evicts_when_it_holds_budget_and_interval(pair, side, budget, interval, block, seed, twins, device):
    """Two rows, one with padding, counted by hand. A head with budget + interval tokens or more evicts down to the
    budget. A head with fewer keeps its tokens in their slots."""
    generator = torch.Generator().manual_seed(seed)
    module = checkers.module(getattr(twins, side), pair)
    state = new(pair, module, device, budget=budget, interval=interval, block_size=block)
    held = [0, 0]
    for count in (block, block, 1, 1, 1, block):
        real = torch.ones(2, count, dtype=torch.bool, device=device)
        real[1, :count // 2] = False
        before = state.positions.clone()
        feed(state, tokens(count, generator, device), real)
        for row in range(2):
            came = held[row] + int(real[row].sum())
            held[row] = budget if came >= budget + interval else came
            assert state.occupied[row].sum(-1).tolist() == [held[row]]
            assert bool(state.occupied[row, :, :held[row]].all()), "the tokens must have no gaps between them"
            late = checkers.ask(pair.name, "SCORES_WHEN_DUE", False)
            assert late or bool(torch.isfinite(state.score[row][state.occupied[row]]).all())
            if held[row] == came:
                old = before[row] >= 0
                assert_same(state.positions[row][old], before[row][old], what="tokens of a head that evicts nothing")


@SIDES
def test_an_interval_of_one_is_the_default(pair, side, twins, device):
    module = checkers.module(getattr(twins, side), pair)
    one, plain, several = (
        new(pair, module, device, budget=4, block_size=9, **options)
        for options in ({"interval": 1}, {}, {"interval": 5})
    )
    generator = torch.Generator().manual_seed(4)
    prompt, token = tokens(9, generator, device), tokens(1, generator, device)
    for state in (one, plain, several):
        feed(state, prompt)
    assert one.key.shape == plain.key.shape and several.key.shape[2] == plain.key.shape[2] + 4
    assert_same(several.positions[..., :4], plain.positions[..., :4], what="tokens kept of the first block")
    for state in (one, plain):
        feed(state, token)
    for name in ("positions", "score"):
        assert_same(getattr(one, name), getattr(plain, name), what=name)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("options", [
    {"budget": 139, "interval": 7, "block_size": 50, "prompt": 147},
    {"budget": 3, "interval": 140, "block_size": 70, "prompt": 139},
    {"budget": 66, "interval": 67, "block_size": 40, "prompt": 131},
], ids=["budget", "interval", "both"])
def test_many_slots(pair, options, twins, device):
    """More slots than a chunk of the kernels, and steps beyond an eviction. In the interpreter, odd and even numbers of
    slots take different paths."""
    own = {name: value for name, value in checkers.ask(pair.name, "SMALL", {}).items() if name != "block_size"}
    config = {**own, **{name: value for name, value in options.items() if name != "prompt"}}
    trace = StateTrace(
        method=pair.name, config=tuple(config.items()), batch=1, key_value_heads=1, group=2, prompt=options["prompt"],
        steps=7 if options["budget"] > 100 else 5, seed=5, device=str(device),
    )
    summary = lockstep.run(trace, checkers.module(twins.optimized, pair))
    assert summary.decisive >= 1


# Our own kernels, for any implementation under test ---------------------------------------------------------------


def test_only_heads_that_are_due_are_ranked(pair, device):
    """A step of which one row is due writes the scratch memory of that row, and no launch that of the other."""
    generator = torch.Generator().manual_seed(8)
    state = new(pair, pair.optimized, device, budget=3, interval=4, block_size=6)
    if state._rule == "nothing":
        pytest.skip("its steps are blocks of one token, which moves to its slot in every head")
    real = torch.ones(2, 6, dtype=torch.bool, device=device)
    real[1, :2] = False
    feed(state, tokens(6, generator, device), real)                              # 6 and 4 tokens; at most 6 are kept
    assert state._counts.tolist() == [[6], [4]]
    state._numbers.fill_(-7)
    feed(state, tokens(1, generator, device))
    assert state.occupied.sum(-1).tolist() == [[3], [5]] == state._counts.tolist()
    _, ranks, _, fates = state._numbers
    wide = state._ranks is not None and state._ranks.dtype == torch.int64        # then its codes are elsewhere
    for numbers in (fates,) if wide else (ranks, fates):
        assert bool((numbers[0, :7] != -7).all()) and bool((numbers[1] == -7).all())
    plain = new(pair, pair.optimized, device, budget=3, block_size=6)
    assert plain._ranks is None
    assert plain._rule == "append" or plain._counts is None, "without an interval there is nothing to count"
