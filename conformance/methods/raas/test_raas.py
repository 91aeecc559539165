"""RaaS under test: a query renews the timestamps of the tokens that it attends to enough; the oldest one is evicted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.strategies import state_traces
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.lab import compile_only

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))
HOW = pytest.mark.parametrize("how", ("steps", "block"))


def new(module, device, budget, block=1, heads=1, **options):
    return module.RaaSState(
        module.RaaSConfig(budget, block, **options), batch=2, query_heads=heads, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )


def attending(asked, device, heads=1):
    """Token t has a key of its own, and its query attends to the tokens asked[t] (alike), and to hardly any other."""
    count = len(asked)
    key = torch.zeros(2, 1, count, 16, device=device)
    query = torch.zeros(2, heads, count, 16, device=device)
    for token, targets in enumerate(asked):
        key[:, :, token, token] = 16
        query[:, :, token, list(targets)] = 16
    return query, key, key


def feed(state, how, query, key, value):
    if how == "block":
        state.append_block(query, key, value)
        return
    for token in range(key.shape[2]):
        state.step(query[:, :, token], key[:, :, token], value[:, :, token])


def held(state):
    positions = state.positions[0, 0]
    return sorted(positions[positions >= 0].tolist())


@SIDES
@HOW
def test_raas_evicts_the_token_that_no_query_renewed(side, how, twins, device):
    """Queries 1 and 2 attend to token 0, so that token 1 has the oldest timestamp, its own."""
    state = new(getattr(twins, side).baselines.raas, device, 2, 3, alpha=0.5)
    feed(state, how, *attending([[0], [0], [0]], device))
    assert held(state) == [0, 2]
    assert {int(p): float(s) for p, s in zip(state.positions[0, 0], state.score[0, 0], strict=True) if p >= 0} == {
        0: 2.0, 2: 2.0,
    }


@SIDES
@HOW
def test_raas_evicts_the_oldest_of_equal_timestamps(side, how, twins, device):
    """Every query attends to all tokens. A new token's slot is that of an evicted one, and lower than an older one's.
    """
    state = new(getattr(twins, side).baselines.raas, device, 3, 2, alpha=0.0)
    feed(state, how, *attending([range(token + 1) for token in range(8)], device))
    assert held(state) == [5, 6, 7]


@pytest.mark.parametrize("fused", [True, False])
def test_raas_steps_in_one_kernel_or_in_two_evict_the_oldest(fused, twins, device):
    """After the first tokens, a token's slot is not its index any more."""
    with compile_only.fused_as(checkers.pair("raas"), fused):
        state = new(twins.optimized.baselines.raas, device, 3, alpha=0.0)
        feed(state, "steps", *attending([range(token + 1) for token in range(8)], device))
    assert held(state) == [5, 6, 7]


@SIDES
@HOW
@pytest.mark.parametrize(("alpha", "kept"), [(0.5, [0, 2]), (0.5001, [1, 2])])
def test_raas_renews_at_a_weight_of_alpha_or_more(side, how, alpha, kept, twins, device):
    """The last query gives tokens 0 and 2 one half each, exactly."""
    state = new(getattr(twins, side).baselines.raas, device, 2, alpha=alpha)
    feed(state, how, *attending([[0], [1], [0, 2]], device))
    assert held(state) == kept


@SIDES
@HOW
def test_raas_averages_the_weights_of_a_group(side, how, twins, device):
    """The second of two heads attends to token 0: a mean of one half."""
    for alpha, kept in ((0.4, [0, 2]), (0.6, [1, 2])):
        state = new(getattr(twins, side).baselines.raas, device, 2, heads=2, alpha=alpha)
        query, key, value = attending([[0], [1], [0]], device, heads=2)
        query[:, 0, 2] = 0
        query[:, 0, 2, 2] = 16
        feed(state, how, query, key, value)
        assert held(state) == kept, alpha


@SIDES
@HOW
def test_raas_protects_the_first_and_the_newest_tokens(side, how, twins, device):
    """The last query renews all tokens but token 4, which is one of the two newest. Token 0 is a sink."""
    module = getattr(twins, side).baselines.raas
    asked = [[0], [1], [2], [3], [4], [0, 1, 2, 3]]
    state = new(module, device, 4, 6, alpha=0.2, sinks=1, recent=2)
    feed(state, how, *attending(asked, device))
    assert held(state) == [0, 3, 4, 5]


@SIDES
@pytest.mark.parametrize("victim", [1, 5, 37])
def test_raas_steps_find_the_slot_of_the_oldest_timestamp(side, victim, twins, device):
    """The last query attends to all tokens but one. 40 slots: more than the kernel reads at a time on the CPU."""
    state = new(getattr(twins, side).baselines.raas, device, 40, 4, alpha=0.01)
    key = torch.zeros(2, 1, 41, 16, device=device)
    key[..., 0] = 40
    key[:, :, victim] = 0
    state.prefill(torch.zeros_like(key)[:, :, :40], key[:, :, :40], key[:, :, :40])           # renews all alike
    query = torch.zeros(2, 1, 16, device=device)
    query[..., 0] = 1
    state.step(query, key[:, :, 40], key[:, :, 40])
    assert held(state) == [t for t in range(41) if t != victim]


@SIDES
def test_raas_padding_renews_nothing(side, twins, device):
    """The query of padding attends to token 1. Positions count padding."""
    state = new(getattr(twins, side).baselines.raas, device, 2, 4, alpha=0.5)
    occupied = torch.tensor([[True, True, False, True]] * 2, device=device)
    state.prefill(*attending([[0], [0], [1], [0]], device), occupied)
    assert held(state) == [0, 3]
    assert sorted(state.score[0, 0, :2].tolist()) == [3.0, 3.0]


@SIDES
def test_raas_padding_behind_the_tokens_renews_nothing(side, twins, device):
    """Not even with an alpha of 0."""
    state = new(getattr(twins, side).baselines.raas, device, 2, 4, alpha=0.0)
    occupied = torch.tensor([[True, True, True, False]] * 2, device=device)
    state.prefill(*attending([[0], [0], [0], [0]], device), occupied)
    assert held(state) == [1, 2]
    assert state.score[0, 0, :2].tolist() == [2.0, 2.0]


@SIDES
def test_raas_needs_an_alpha(side, twins):
    with pytest.raises(TypeError, match="alpha"):
        getattr(twins, side).baselines.raas.RaaSConfig(4)


@given(trace=state_traces("raas", max_prompt=12, max_steps=8))
@few
def test_raas_timestamps_do_not_decrease(trace, twins):
    """Each is at least its token's position, and at most that of the newest token; a token's never decreases."""
    module = twins.optimized.baselines.raas
    state = module.RaaSState(module.RaaSConfig(**trace.options), **trace.sizes)
    prompt = trace.prompt_inputs
    if prompt is not None:
        state.prefill(**prompt)
    times: dict[tuple[int, int, int], float] = {}
    for number in range(trace.steps):
        state.step(**trace.step_inputs(number))
        positions, score = state.positions.cpu(), state.score.cpu()
        now = {
            (b, h, int(positions[b, h, s])): float(score[b, h, s])
            for b, h, s in (positions >= 0).nonzero().tolist()
        }
        assert all(at[2] <= time <= state.tokens_seen - 1 for at, time in now.items())
        assert all(now[at] >= time for at, time in times.items() if at in now)
        times = now
