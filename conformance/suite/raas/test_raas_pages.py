"""RaaS with pages under test: a query renews pages by the bounds of its logits, and whole pages are evicted."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
HOW = pytest.mark.parametrize("how", ("steps", "block"))


def new(twins, side, device, budget, page_size=2, block=32, heads=1, **options):
    module = getattr(twins, side).baselines.raas
    options = {"interval": page_size, **options}
    return module.RaaSState(
        module.RaaSConfig(budget, block, page_size=page_size, **options), batch=2, query_heads=heads,
        key_value_heads=1, head_dim=16, dtype=torch.float32, device=device,
    )


def asking(asked, device, size=2, heads=1):
    """The keys of page p are 1 in channel p. The query of token t asks for the pages asked[t]."""
    count = len(asked)
    key = torch.zeros(2, 1, count, 16, device=device)
    query = torch.zeros(2, heads, count, 16, device=device)
    for token, pages in enumerate(asked):
        key[:, :, token, token // size] = 1
        query[:, :, token, list(pages)] = 1
    return query, key, key


def feed(state, how, query, key, value, occupied=None):
    if how == "block":
        state.append_block(query, key, value, occupied)
        return
    for token in range(key.shape[2]):
        state.step(query[:, :, token], key[:, :, token], value[:, :, token])


def held(state, row=0):
    positions = state.positions[row, 0]
    return sorted(positions[positions >= 0].tolist())


def times(state, row=0):
    return {int(p): int(s) for p, s in zip(state.positions[row, 0], state.score[row, 0], strict=True) if p >= 0}


@pytest.mark.property("state")
@SIDES
@HOW
def test_raas_renews_half_of_the_page_budget(side, how, twins, device):
    """Two of the four pages before the last one; and without an eviction, all timestamps remain."""
    state = new(twins, side, device, 10, interval=9)
    query, key, value = asking([*[[]] * 8, [0, 2, 3], [1, 3, 2]], device)
    query[:, :, 8:, 4] = 5                                              # their own page takes none of the places
    feed(state, how, query, key, value)
    # Before, the oldest pages of equal bounds were renewed: pages 0 and 1.
    assert times(state) == {0: 8, 1: 8, 2: 9, 3: 9, 4: 9, 5: 9, 6: 7, 7: 7, 8: 9, 9: 9}


@pytest.mark.property("state")
@SIDES
@HOW
def test_raas_reads_queries_and_keys_of_any_layout(side, how, twins, device):
    """Heads after tokens, channels before them."""
    for layout in ((0, 2, 1, 3), (3, 1, 0, 2)):
        state = new(twins, side, device, 4, heads=2)
        given_ = asking([[], [], [0], [0], [0], [1]], device, heads=2)
        back = torch.tensor(layout).argsort().tolist()
        feed(state, how, *(x.permute(layout).contiguous().permute(back) for x in given_))
        assert held(state) == [2, 3, 4, 5]


#: Five pages, of which the first one leaves. Then the last one has the lowest slots.
FIVE = [*[[]] * 8, [1, 2], [3, 1]]


@pytest.mark.property("ties", slots="fixed")
@SIDES
def test_raas_renews_the_oldest_of_pages_with_equal_bounds(side, twins, device):
    """Queries 10 and 11 ask for nothing, and renew pages 1 and 2. Pages 3 and 4 have equal timestamps then, and page 4
    is in the lowest slots."""
    state = new(twins, side, device, 8)
    feed(state, "steps", *asking([*FIVE, [], []], device))
    assert held(state) == [2, 3, 4, 5, 8, 9, 10, 11]


@pytest.mark.property("state")
@SIDES
@pytest.mark.parametrize("group", [1, 8])
def test_raas_renews_the_oldest_of_many_pages_with_equal_bounds(side, group, twins, device):
    """Of 18 pages with the same key, queries renew the first eight. The others keep their times, and leave in turn."""
    module = getattr(twins, side).baselines.raas
    dtype = torch.float64 if side == "reference" else torch.float32  # where sums of torch's depend on the page
    state = module.RaaSState(
        module.RaaSConfig(17, 2, page_size=1, interval=1), batch=1, query_heads=group, key_value_heads=1, head_dim=16,
        dtype=dtype, device=device,
    )
    generator = torch.Generator().manual_seed(0)

    def draw(heads):
        return torch.randn(1, heads, 16, generator=generator, dtype=torch.float64).to(device, dtype)

    key = draw(1)
    for _ in range(20):
        state.step(draw(group), key, key)
    assert times(state) == {**dict.fromkeys(range(8), 19), **{token: token for token in range(11, 20)}}


@pytest.mark.property("state")
@SIDES
@HOW
def test_raas_keeps_the_incomplete_page(side, how, twins, device):
    """Beside the two pages of the budget. Its own query is the last one to renew the page."""
    state = new(twins, side, device, 7, page_size=3)
    feed(state, how, *asking([[0]] * 11, device, size=3))
    assert held(state) == [0, 1, 2, 6, 7, 8, 9, 10]
    assert times(state) == {0: 10, 1: 10, 2: 10, 6: 8, 7: 8, 8: 8, 9: 10, 10: 10}


@pytest.mark.property("state")
@SIDES
@HOW
@pytest.mark.parametrize(("sinks", "recent", "evicted"), [(0, 0, 0), (1, 0, 2), (2, 0, 2), (1, 3, 1), (1, 4, 1)])
def test_raas_protects_the_pages_of_the_first_and_the_newest_tokens(side, how, sinks, recent, evicted, twins, device):
    """The timestamps are 3, 7, 5 and 7. Whole pages are protected, if only one of their tokens is."""
    state = new(twins, side, device, 6, sinks=sinks, recent=recent)
    feed(state, how, *asking([[], [], [0], [0], [1], [1], [1], [1]], device))
    assert held(state) == [token for token in range(8) if token // 2 != evicted]


@pytest.mark.property("state")
@SIDES
@pytest.mark.parametrize("sign", [1, -1])
def test_raas_reads_all_keys_of_a_large_page(side, sign, twins, device):
    """More than a kernel reads at a time. Only token 18 has the channel that the last query asks for as large; the
    queries before it ask for page 1."""
    state = new(twins, side, device, 40, page_size=20, block=64)
    query, key, value = asking([*[[]] * 40, *[[1]] * 20], device, size=20)
    key[:, :, 18, 3], key[:, :, 20:40, 3] = 5 * sign, 2 * sign
    query[:, :, 59] = 0
    query[:, :, 59, 3] = sign
    feed(state, "block", query, key, value)
    assert held(state) == [*range(20), *range(40, 60)]


@pytest.mark.property("state")
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("options", [
    {"budget": 40, "page_size": 2, "interval": 3, "block_size": 24, "recent": 3},
    {"budget": 45, "page_size": 20, "interval": 20, "block_size": 70},
    {"budget": 20, "page_size": 1, "interval": 1, "block_size": 33, "sinks": 2},
], ids=["many pages", "large pages", "single tokens"])
def test_raas_with_many_pages_keeps_step_with_float64(options, twins, device):
    """More pages and queries, and larger pages, than the kernels take at a time. Rows of
    different lengths are reordered, then reset."""
    trace = StateTrace(
        method="raas", config=tuple({"alpha": None, **options}.items()), batch=2, key_value_heads=1, group=2,
        prompt=100, steps=6, seed=8, padding="random", reorder_at=2, reset_at=5, device=str(device),
    )
    assert lockstep.run(trace, twins.optimized.baselines.raas).decisive >= 1
