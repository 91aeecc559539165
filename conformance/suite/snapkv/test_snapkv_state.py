"""SnapKV's state under test: it compresses a prompt in one block as `compress` does, and again in every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.case import WindowCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.oracle import upcast_all
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import snapkv as judge
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.reference.baselines import snapkv

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.first]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
some = settings(max_examples=max(at_least(4), settings().max_examples // 2))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def prompt(count, seed, device, heads=2):
    generator = torch.Generator().manual_seed(seed)
    names = (("query", 2 * heads), ("key", heads), ("value", heads))
    return {name: torch.randn(1, h, count, 16, generator=generator).to(device) for name, h in names}


def new(module, device, dtype=torch.float32, heads=2, **config):
    return module.SnapKVState(
        module.SnapKVConfig(**config), batch=1, query_heads=2 * heads, key_value_heads=heads, head_dim=16, dtype=dtype,
        device=device,
    )


@given(
    count=st.integers(2, 24), budget=st.integers(1, 12), window=st.integers(1, 6),
    kernel_size=st.sampled_from((3, 1, 5, 7)), seed=st.integers(0, 2**31),
)
@some
def test_snapkv_state_compresses_a_prompt_as_compress_does(count, budget, window, kernel_size, seed, device):
    """For one block in float64 with separate heads, the two implementations keep the same tokens."""
    given_ = upcast_all(prompt(count, seed, device))
    state = new(
        snapkv, device, torch.float64, budget=budget, block_size=count, window=window, kernel_size=kernel_size
    )
    state.prefill(**given_)
    observers = given_["query"][:, :, -min(window, budget):]
    kept = snapkv.compress(observers, given_["key"], given_["value"], budget, kernel_size=kernel_size).kept
    held = state.positions[..., :budget].sort(-1).values[..., -kept.shape[2]:]
    assert_same(held, kept, what="tokens held")


@pytest.mark.property("accuracy")
@given(
    count=st.integers(2, 12), block=st.integers(1, 12), window=st.integers(1, 6),
    kernel_size=st.sampled_from((3, 1, 5)), seed=st.integers(0, 2**31),
)
@example(count=9, block=2, window=5, kernel_size=3, seed=1)
@few
def test_snapkv_state_remembers_the_window_across_blocks(count, block, window, kernel_size, seed, twins, device):
    """If all tokens fit, the queries of the last `window` tokens determine the scores of all tokens, for any blocks."""
    given_ = prompt(count, seed, device, heads=1)
    state = new(
        twins.optimized.baselines.snapkv, device, heads=1, budget=count, block_size=block, window=window,
        kernel_size=kernel_size,
    )
    state.prefill(**given_)
    case = WindowCase.of(
        given_["query"][:, :, -window:], given_["key"], given_["value"], budget=count, kernel_size=kernel_size
    )
    truth = snapkv.window_score(**upcast_all(case.score_inputs))
    assert_within(state.score[..., :count], truth, judge.score_bound(case, shared_heads=False), what="score")


@pytest.mark.property("state")
def test_snapkv_state_reorders_the_window_with_its_row(twins, device):
    """After a reorder, the queries of a row's own window decide about its tokens. One row's window has padding."""
    generator = torch.Generator().manual_seed(12)
    query, key, value = (torch.randn(2, heads, 13, 16, generator=generator).to(device) for heads in (2, 1, 1))
    config = {"budget": 7, "block_size": 5, "window": 4, "kernel_size": 1}
    both = lockstep.pair(
        "snapkv", twins.optimized.baselines.snapkv, config=config, batch=2, query_heads=2, key_value_heads=1,
        head_dim=16, dtype=torch.float32, device=device,
    )
    occupied = torch.ones(2, 10, dtype=torch.bool, device=device)
    occupied[0, 7:9] = False
    both.prefill(*(tensor[:, :, :10] for tensor in (query, key, value)), occupied)
    both.reorder(torch.tensor([1, 0], device=device))
    for step in range(10, 13):
        both.step(*(tensor[:, :, step] for tensor in (query, key, value)))


@pytest.mark.property("state")
@pytest.mark.parametrize("budget", [43, 44])
def test_snapkv_state_counts_every_query_of_a_large_window(budget, twins, device):
    """A window of 40 queries, which kernels look at in several pieces, over a prompt of three blocks."""
    config = {"budget": budget, "block_size": 20, "window": 40, "kernel_size": 3}
    trace = StateTrace(
        method="snapkv", group=2, head_dim=16, prompt=60, steps=2, config=tuple(config.items()), padding="random",
        seed=3, device=str(device),
    )
    lockstep.run(trace, twins.optimized.baselines.snapkv)


@pytest.mark.property("state")
@pytest.mark.parametrize("content", ["ordinary", "duplicates"])
@pytest.mark.parametrize(("budget", "interval", "window", "kernel_size", "prompt_length"), [
    (5, 1, 2, 3, 30), (20, 3, 9, 5, 150), (4, 1, 4, 1, 12), (12, 2, 3, 7, 70),
])
def test_snapkv_state_keeps_step_after_a_prompt_that_is_one_block(
    content, budget, interval, window, kernel_size, prompt_length, twins, device
):
    """More tokens than the cache may hold, without padding. Later steps evict by what the prompt has left."""
    config = {
        "budget": budget, "block_size": prompt_length, "interval": interval, "window": window,
        "kernel_size": kernel_size,
    }
    trace = StateTrace(
        method="snapkv", batch=2, key_value_heads=2, group=2, head_dim=24, prompt=prompt_length, steps=6,
        config=tuple(config.items()), padding="none", content=content, seed=budget, device=str(device),
    )
    lockstep.run(trace, twins.optimized.baselines.snapkv)


@pytest.mark.property("state")
@SIDES
def test_snapkv_state_pools_along_positions_and_not_slots(side, twins, device):
    """The queries attend to token 3, which is in the last slot. The next token is in the first slot, but adjacent by
    position."""
    state = new(
        getattr(twins, side).baselines.snapkv, device, heads=1, budget=4, block_size=1, window=1, kernel_size=3
    )
    key = torch.zeros(1, 1, 12, 16, device=device)
    key[0, 0, 3, 0] = 8
    query = torch.zeros(1, 2, 12, 16, device=device)
    query[..., 0] = 8
    held = []
    for step in range(12):
        state.step(*(tensor[:, :, step] for tensor in (query, key, key)))
        held.append(sorted(state.positions[0, 0, :4].tolist()))
    # A pool of 3 gives the attention of token 3 to the tokens before and after it. The one after it arrives and is
    # kept.
    assert held[3:6] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    assert all({2, 3, 4} <= set(tokens) for tokens in held[5:])


@pytest.mark.property("state")
@SIDES
def test_snapkv_state_counts_padding_as_a_place_in_the_window(side, twins, device):
    """The window is the last `window` positions of the text. Padding in it does not observe, and its slots are free for
    other tokens."""
    state = new(
        getattr(twins, side).baselines.snapkv, device, heads=1, budget=3, block_size=8, window=3, kernel_size=1
    )
    given_ = prompt(8, 5, device, heads=1)
    occupied = torch.ones(1, 8, dtype=torch.bool, device=device)
    occupied[0, 6] = False
    state.prefill(**given_, occupied=occupied)
    held = state.positions[0, 0, :3].tolist()
    assert {5, 7} < set(held) and 6 not in held
    assert (state.score[0, 0, :3] == torch.inf).sum() == 2
