"""RaaS with pages under test: a query renews pages by the bounds of its logits, and whole pages are evicted:
what only our own sides promise.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.strategies import state_traces
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.suite.raas.test_raas_pages import FIVE, HOW, SIDES, asking, feed, held, new, times

pytestmark = pytest.mark.kind("equivalence")

few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


@SIDES
@HOW
@pytest.mark.parametrize(("fifth", "last", "kept"), [(1, 0, [0, 1, 4, 5]), (0, 1, [2, 3, 4, 5]), (0, 0, [0, 1, 4, 5])])
def test_raas_evicts_the_page_with_the_oldest_timestamp(side, how, fifth, last, kept, twins, device):
    """Each query renews one of the pages before its own. The queries of tokens 4 and 5 have two to choose from."""
    state = new(twins, side, device, 4)
    feed(state, how, *asking([[], [], [0], [0], [fifth], [last]], device))
    assert held(state) == kept
    assert set(times(state).values()) == {5}


@SIDES
@HOW
@pytest.mark.parametrize("sign", [1, -1])
def test_raas_bounds_logits_by_the_range_of_each_channel(side, how, sign, twins, device):
    """The keys (3, 0) and (0, 3) of page 0 may lie in a page with (3, 3): 6 for the query (1, 1), although its largest
    logit is 3. Both keys of page 1 are (2, 2)."""
    state = new(twins, side, device, 4)
    query, key, value = asking([[]] * 6, device)
    key[:] = 0
    key[:, :, 0, 0] = key[:, :, 1, 1] = 3
    key[:, :, 2:4, :2] = 2
    key *= sign
    query[:, :, 4:, :2] = sign
    feed(state, how, query, key, value)
    assert held(state) == [0, 1, 4, 5]


@SIDES
@pytest.mark.parametrize(("scale", "kept"), [(0.5, 0), (-0.5, 1)])
def test_raas_bounds_logits_with_the_sign_of_the_scale(side, scale, kept, twins, device):
    """The keys are 3 and 2, and the queries 1, in the only channel that is not 0."""
    state = new(twins, side, device, 4, scale=scale)
    query, key, value = asking([[]] * 6, device)
    key[:] = query[:] = 0
    key[:, :, :2, 7], key[:, :, 2:4, 7], query[:, :, 4:, 7] = 3, 2, 1
    feed(state, "block", query, key, value)
    assert held(state) == [2 * kept, 2 * kept + 1, 4, 5]


@SIDES
@HOW
def test_raas_averages_the_bounds_of_a_group(side, how, twins, device):
    """The first of two heads asks for page 0, and the second one three times as much for page 1."""
    state = new(twins, side, device, 4, heads=2)
    query, key, value = asking([[]] * 6, device, heads=2)
    query[:, 0, 4:, 0] = 1
    query[:, 1, 4:, 1] = 3
    feed(state, how, query, key, value)
    assert held(state) == [2, 3, 4, 5]


@SIDES
@HOW
def test_raas_evicts_the_oldest_of_pages_with_equal_timestamps(side, how, twins, device):
    """Query 10 renews pages 1 and 4, and query 11 pages 2 and 3. Page 4 has lower slots than page 1."""
    state = new(twins, side, device, 8)
    feed(state, how, *asking([*FIVE, [1, 4], [2, 3]], device))
    if how == "steps":
        assert state.positions[0, 0, :2].tolist() == [8, 9]
        assert held(state) == list(range(4, 12))
    else:
        assert held(state) == list(range(4, 12))                      # of six pages, two leave


@SIDES
@pytest.mark.parametrize(("budget", "interval", "most", "left"), [
    (4, 2, 5, 4), (5, 2, 6, 5), (4, 3, 6, 5), (4, 4, 7, 4), (4, 5, 8, 5), (1, 1, 1, 1), (3, 3, 5, 2),
])
def test_raas_counts_pages(side, budget, interval, most, left, twins, device):
    """A head holds up to `budget + interval - 1` tokens. With one more, it keeps the complete pages that the budget has
    room for, and the tokens of the incomplete page."""
    size = min(2, budget)
    state = new(twins, side, device, budget, page_size=size, interval=interval)
    query, key, value = asking([[]] * (most + 1), device)
    feed(state, "block", query[:, :, :most], key[:, :, :most], value[:, :, :most])
    assert len(held(state)) == most == state.config.capacity
    state.step(query[:, :, most], key[:, :, most], value[:, :, most])
    assert len(held(state)) == left == budget // size * size + (most + 1) % size


@SIDES
def test_raas_pages_have_no_padding(side, twins, device):
    """The second row's tokens are 1, 3, 4, 5, 7 and 8, in pages of two. Queries of padding renew nothing."""
    state = new(twins, side, device, 4)
    occupied = torch.ones(2, 9, dtype=torch.bool, device=device)
    occupied[1, [0, 2, 6]] = False
    query, key, value = asking([[]] * 9, device)
    for page, tokens in enumerate(((1, 3), (4, 5), (7, 8))):
        key[1, :, tokens] = 0
        key[1, :, tokens, page] = 1
    query[1, :, [2, 6], 0] = 1                                          # padding asks for page 0
    query[1, :, 7, 0] = query[1, :, 8, 1] = 1
    feed(state, "block", query, key, value, occupied)
    assert held(state, 1) == [4, 5, 7, 8]
    assert set(times(state, 1).values()) == {8}


@SIDES
def test_raas_padding_behind_the_tokens_renews_no_page(side, twins, device):
    state = new(twins, side, device, 4)
    occupied = torch.tensor([[True] * 5 + [False]] * 2, device=device)
    feed(state, "block", *asking([[], [], [0], [0], [1], [0]], device), occupied)
    assert times(state) == {0: 3, 1: 3, 2: 4, 3: 4, 4: 4}


@SIDES
def test_raas_a_row_s_pages_go_on_after_a_reorder_and_begin_anew_after_a_reset(side, twins, device):
    """The first row has padding, so that its pages end elsewhere."""
    state = new(twins, side, device, 4)
    occupied = torch.ones(2, 3, dtype=torch.bool, device=device)
    occupied[0, 0] = False
    query, key, value = asking([[]] * 8, device)
    state.prefill(query[:, :, :3], key[:, :, :3], value[:, :, :3], occupied)
    state.reorder(torch.tensor([1, 0], device=device))
    feed(state, "steps", query[:, :, 3:], key[:, :, 3:], value[:, :, 3:])
    assert held(state, 0) == [0, 1, 6, 7] and held(state, 1) == [1, 2, 5, 6, 7]
    state.reset()
    feed(state, "steps", query[:, :, :3], key[:, :, :3], value[:, :, :3])
    assert times(state, 0) == times(state, 1) == {0: 2, 1: 2, 2: 2}


@SIDES
@pytest.mark.parametrize("cuts", [(1,) * 13, (13,), (4, 1, 8), (5, 8)])
def test_raas_timestamps_do_not_depend_on_blocks(side, cuts, twins, device):
    """As long as nothing leaves. Numbers are small integers, so that bounds are exact."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randint(-3, 4, (2, 1, 13, 16), generator=generator).float().to(device) for _ in range(2))
    found = []
    for parts in (cuts, (2, 11)):
        state = new(twins, side, device, 12, page_size=3)
        for q, k in zip(query.split(parts, 2), key.split(parts, 2), strict=True):
            feed(state, "block" if k.shape[2] > 1 else "steps", q, k, k)
        found.append((times(state, 0), times(state, 1)))
    assert found[0] == found[1]
    assert {*found[0][0].values()} != {12}, "some page is renewed by an earlier query only"


@st.composite
def paged(draw, **options):
    """A trace with pages of 1 to 4 tokens."""
    trace = draw(state_traces("raas", **options))
    budget = trace.options["budget"]
    size = draw(st.integers(1, min(4, budget)))
    given_ = {**trace.options, "alpha": None, "page_size": size, "recent": 0, "sinks": 0}
    given_["interval"] = size + draw(st.sampled_from((0, 0, 1, size)))
    if budget // size > 2:
        given_["sinks"] = draw(st.integers(0, size))
        given_["recent"] = draw(st.integers(0, size))
    return dataclasses.replace(trace, config=tuple(given_.items()))


@given(trace=paged(max_prompt=12, max_steps=8))
@few
def test_raas_holds_whole_pages_whose_timestamps_do_not_decrease(trace, twins):
    """A page is held whole or not at all, but for the incomplete one. Its tokens have one timestamp, which is at least
    the position of its newest token."""
    module = twins.optimized.baselines.raas
    state = module.RaaSState(module.RaaSConfig(**trace.options), **trace.sizes)
    prompt, size = trace.prompt_inputs, trace.options["page_size"]
    real = torch.ones(trace.batch, trace.prompt + trace.steps, dtype=torch.bool)
    if prompt is not None:
        state.prefill(**prompt)
        if prompt["occupied"] is not None:
            real[:, :trace.prompt] = prompt["occupied"].cpu()
    index = real.long().cumsum(1) - 1
    before: dict[tuple[int, int, int], float] = {}
    for number in range(trace.steps):
        state.step(**trace.step_inputs(number))
        positions, score = state.positions.cpu(), state.score.cpu()
        now: dict[tuple[int, int, int], float] = {}
        for b, h in torch.cartesian_prod(*map(torch.arange, positions.shape[:2])).tolist():
            pages: dict[int, list[int]] = {}
            for slot in (positions[b, h] >= 0).nonzero().flatten().tolist():
                pages.setdefault(int(index[b, positions[b, h, slot]]) // size, []).append(slot)
            total = int(real[b, :state.tokens_seen].sum())
            for page, slots in pages.items():
                assert len(slots) == (total % size if page == total // size else size)
                (time,) = set(score[b, h, slots].tolist())
                assert int(positions[b, h, slots].max()) <= time <= state.tokens_seen - 1
                now[b, h, page] = time
        assert all(now[page] >= time for page, time in before.items() if page in now)
        before = now


@SIDES
def test_raas_with_pages_needs_no_alpha(side, twins):
    config = getattr(twins, side).baselines.raas.RaaSConfig(64, page_size=16, interval=16)
    assert (config.alpha, config.page_budget, config.capacity) == (None, 4, 79)


def test_the_checker_draws_pages():
    """Of one token and of several."""
    drawn = []

    @settings(max_examples=60, database=None, derandomize=True)
    @given(config=checkers.checker_of("raas").configs(8, 8))
    def draw(config):
        drawn.append(config.get("page_size"))

    draw()
    assert {None, 1, 2, 3} <= set(drawn)
