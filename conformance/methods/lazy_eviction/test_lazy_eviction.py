"""LazyEviction under test: the time since a token was last attended to, measured by its longest gap so far."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.strategies import state_traces
from kvtwin.conformance.judge.compare import assert_within

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
HOW = pytest.mark.parametrize("how", ("steps", "block"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def new(twins, side, device, budget, block=1, heads=1, **options):
    module = getattr(twins, side).baselines.lazy_eviction
    return module.LazyEvictionState(
        module.LazyEvictionConfig(budget, block, **options), batch=2, query_heads=heads, key_value_heads=1,
        head_dim=32, dtype=torch.float32, device=device,
    )


def attending(asked, device, heads=1):
    """Token t has a key of its own. Its query attends to the tokens asked[t] alike, and to hardly any other, or to all
    alike if asked[t] is empty."""
    count = len(asked)
    key = torch.zeros(2, 1, count, 32, device=device)
    query = torch.zeros(2, heads, count, 32, device=device)
    for token, targets in enumerate(asked):
        key[:, :, token, token] = 16
        query[:, :, token, list(targets)] = 16
    return query, key, key


def feed(state, how, query, key, value, occupied=None):
    if how == "block":
        state.append_block(query, key, value, occupied)
        return
    for token in range(key.shape[2]):
        state.step(query[:, :, token], key[:, :, token], value[:, :, token])


def importance(age, gap, shift=1):
    x = shift + age / (gap + 1e-5)
    aged = 2 / (1 + math.exp(x)) if x < 700 else 0.0
    return aged + (2 / (1 + math.exp(gap - 1)) if gap else 0.0)


def scores(state):
    return {int(p): float(s) for p, s in zip(state.positions[0, 0], state.score[0, 0], strict=True) if p >= 0}


def assert_scores(state, expected):
    """Within 64 roundings of float32."""
    found = scores(state)
    assert found.keys() == expected.keys()
    truth = torch.tensor([expected[position] for position in sorted(found)], dtype=torch.float64)
    got = torch.tensor([found[position] for position in sorted(found)])
    assert_within(got, truth, 64 * 2.0**-24 * truth + 2.0**-120, what="importance")


@SIDES
@HOW
@pytest.mark.parametrize("shifted", [True, False])
def test_lazy_eviction_importances_by_hand(shifted, side, how, twins, device):
    """Query 5 is the newest. Token 0 is active at 0, 3 and 4: its longest gap is 3, and its age 1. Token 1 is active at
    1, 2 and 4. Token t counts as last active at t - 1 when it comes. So token 3, active at 5 alone, has a gap of 3.
    Tokens 2 and 4 never are active: they have no gap, and ages of 4 and 2. Token 5 has a gap of 1."""
    state = new(twins, side, device, 8, 8, alpha=0.25, shifted=shifted)
    feed(state, how, *attending([[0], [1], [1], [0], [0, 1], [3, 5]], device))
    shift = int(shifted)
    assert_scores(state, {
        0: importance(1, 3, shift), 1: importance(1, 2, shift), 2: importance(4, 0, shift),
        3: importance(0, 3, shift), 4: importance(2, 0, shift), 5: importance(0, 1, shift),
    })


@SIDES
@HOW
def test_lazy_eviction_evicts_what_never_recurred_first(side, how, twins, device):
    """Tokens 1 to 4 are never active and have an importance of 0: of equal ones, the lowest slot goes."""
    state = new(twins, side, device, 3, 5, alpha=0.5)
    feed(state, how, *attending([[0], [0], [0], [0], [0]], device))
    assert sorted(scores(state)) == ([0, 3, 4] if how == "block" else [0, 2, 4])


@SIDES
@HOW
def test_lazy_eviction_waits_for_a_token_with_a_long_gap(side, how, twins, device):
    """Tokens 0 and 1 were both active at 5, then never again. Token 0 had been away for 5 steps, token 1 never
    for more than one. At the same age, token 0 has the larger first term, and token 1 the larger second one."""
    state = new(twins, side, device, 12, 12, alpha=0.2)
    feed(state, how, *attending([[0], [1], [1], [1], [1], [0, 1], [6], [7]], device))
    found = scores(state)
    assert_scores(state, {**found, 0: importance(2, 5), 1: importance(2, 1)})


@SIDES
@HOW
@pytest.mark.parametrize(("alpha", "active"), [(0.5, True), (0.5001, False)])
def test_lazy_eviction_activates_at_a_weight_of_alpha_or_more(side, how, alpha, active, twins, device):
    """The last query gives tokens 0 and 2 one half each, exactly."""
    state = new(twins, side, device, 4, 4, alpha=alpha)
    feed(state, how, *attending([[0], [1], [0, 2]], device))
    expected = importance(0, 2) if active else importance(2, 1)
    assert_scores(state, {**scores(state), 0: expected})


@SIDES
@HOW
def test_lazy_eviction_averages_the_weights_of_a_group(side, how, twins, device):
    """The second of two heads attends to token 0: a mean of one half."""
    for alpha, expected in ((0.4, importance(0, 2)), (0.6, importance(2, 1))):
        state = new(twins, side, device, 4, 4, heads=2, alpha=alpha)
        query, key, value = attending([[0], [1], [0]], device, heads=2)
        query[:, 0, 2] = 0
        query[:, 0, 2, 2] = 16
        feed(state, how, query, key, value)
        assert_scores(state, {**scores(state), 0: expected})


@SIDES
@HOW
def test_lazy_eviction_protects_the_newest_tokens(side, how, twins, device):
    """Tokens 3 and 4 are never active. Of the others, token 2 has the shortest gap."""
    state = new(twins, side, device, 3, 5, alpha=0.25, recent=2)
    feed(state, how, *attending([[0], [1], [2], [0, 1, 2], [0, 1, 2]], device))
    assert sorted(scores(state)) == [2, 3, 4]


@SIDES
def test_lazy_eviction_padding_activates_nothing_and_takes_time(side, twins, device):
    """Positions count padding."""
    state = new(twins, side, device, 8, 4, alpha=0.0)
    occupied = torch.tensor([[True, False, True, False]] * 2, device=device)
    state.prefill(*attending([[0]] * 4, device), occupied)
    assert_scores(state, {0: importance(1, 2), 2: importance(1, 1)})


@SIDES
def test_lazy_eviction_gaps_move_with_their_tokens(side, twins, device):
    """A new token moves to the slot of the evicted one. Tokens 0 and 4 were active, and stay."""
    state = new(twins, side, device, 3, alpha=0.6)
    feed(state, "steps", *attending([[0], [0], [], [], [4], [], []], device))
    assert_scores(state, {**scores(state), 0: importance(5, 1), 4: importance(2, 1)})


@SIDES
def test_lazy_eviction_needs_an_alpha(side, twins):
    with pytest.raises(TypeError, match="alpha"):
        getattr(twins, side).baselines.lazy_eviction.LazyEvictionConfig(4)


@given(trace=state_traces("lazy_eviction", max_prompt=12, max_steps=8))
@few
def test_lazy_eviction_importances_are_at_most_two(trace, twins):
    """Each term is at most 1. Both are 1 without the shift, at an age of 0 and a gap of 1."""
    module = twins.optimized.baselines.lazy_eviction
    state = module.LazyEvictionState(module.LazyEvictionConfig(**trace.options), **trace.sizes)
    prompt = trace.prompt_inputs
    if prompt is not None:
        state.prefill(**prompt)
    for number in range(trace.steps):
        state.step(**trace.step_inputs(number))
        held = state.score[state.occupied]
        assert bool((held >= 0).all()) and bool((held <= 2).all())
