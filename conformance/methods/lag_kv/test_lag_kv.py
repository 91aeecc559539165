"""LagKV under test: ranks within chunks, scaled by the chunk that follows: what only our own sides promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.suite.lag_kv.test_lag_kv import DIM, PATTERN, SIDES, feed, new, ranks, tokens

pytestmark = pytest.mark.kind("equivalence")

HOW = pytest.mark.parametrize("how", ("steps", "block"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


@SIDES
@HOW
def test_lag_kv_ranks_by_the_spread_of_the_keys(side, how, twins, device):
    """Token 0 is a sink. The last three tokens have no rank, because no chunk follows theirs."""
    state = new(twins, side, device, 8, lag=3, sinks=1)
    key = torch.cat([torch.ones(1, DIM), tokens(2.0, 1.0, 3.0)])
    feed(state, how, key, torch.zeros_like(key))
    assert ranks(state) == {0: 3, 1: 1, 2: 0, 3: 2, 4: 3, 5: 3, 6: 3}


@SIDES
@HOW
def test_lag_kv_has_no_rank_before_the_next_chunk_is_complete(side, how, twins, device):
    state = new(twins, side, device, 8, lag=3)
    key = tokens(2.0, 1.0, 3.0)[:-1]
    feed(state, how, key, key)
    assert set(ranks(state).values()) == {3}


@SIDES
@HOW
def test_lag_kv_adds_the_softmaxes_of_keys_and_values(side, how, twins, device):
    """The softmax of the keys is 0.62, 0.38 and 0.00, and that of the values 0.04, 0.04 and 0.91. Sums of the spreads
    would be 9.5, 9 and 3; keys or values alone would also give another order."""
    state = new(twins, side, device, 8, lag=3)
    feed(state, how, tokens(9.5, 9.0, 0.0), tokens(0.0, 0.0, 3.0))
    assert [ranks(state)[token] for token in range(3)] == [1, 0, 2]


@SIDES
def test_lag_kv_divides_the_squares_by_one_less(side, twins, device):
    """Tokens 0 and 1 have scores of 0.512 and 0.515. With spreads that are 1.6 % smaller, as those of a sum that is
    divided by D, they have 0.516 and 0.512."""
    state = new(twins, side, device, 8, lag=3)
    feed(state, "block", tokens(5.5, 0.0, 6.5), tokens(0.0, 0.75, 0.0))
    assert [ranks(state)[token] for token in range(3)] == [0, 1, 2]


@SIDES
@pytest.mark.parametrize("which", ["key", "value"])
def test_lag_kv_scales_each_channel_by_the_next_chunk(which, side, twins, device):
    """A range of 1000 in channel 0 makes 100 there a tenth; in channel 1 the range is 1."""
    state = new(twins, side, device, 8, lag=2)
    x = torch.zeros(4, DIM)
    x[0, 1], x[1, 0] = 1, 100
    x[3] = 1
    x[3, 0] = 1000
    other = tokens(1.0, 1.0)
    feed(state, "block", *((x, other) if which == "key" else (other, x)))
    assert [ranks(state)[token] for token in (0, 1)] == [1, 0]


@SIDES
@pytest.mark.parametrize("which", ["key", "value"])
def test_lag_kv_scales_by_the_next_chunk_and_not_by_its_own(which, side, twins, device):
    """By its own range, which is 8 in half of the channels, the spread of token 1 would be larger."""
    state = new(twins, side, device, 8, lag=2)
    x = torch.zeros(4, DIM)
    x[0, :4], x[1, 4:20] = 2, 8
    x[3] = 1
    x[3, 4:20] = 64
    other = tokens(1.0, 1.0)
    feed(state, "block", *((x, other) if which == "key" else (other, x)))
    assert [ranks(state)[token] for token in (0, 1)] == [1, 0]


@SIDES
@pytest.mark.parametrize("constant", [0.0, -3.0, 1e30])
def test_lag_kv_ignores_channels_that_are_constant_in_the_next_chunk(constant, side, twins, device):
    state = new(twins, side, device, 8, lag=2)
    key = tokens(1.0, 2.0)
    key[0, 0] = 1e32
    key[2:, 0] = constant
    feed(state, "block", key, torch.zeros_like(key))
    assert [ranks(state)[token] for token in (0, 1)] == [0, 1]


@SIDES
def test_lag_kv_counts_channels_of_a_narrow_range(side, twins, device):
    """In channel 0, the next chunk is 1000 and the next number of float32: token 0 is far away from both."""
    state = new(twins, side, device, 8, lag=2)
    key = tokens(0.0, 2.0)
    key[:2, 0] = torch.tensor([2000, 1000])
    key[2:, 0] = torch.tensor([1000, 1000 + 2.0**-14])
    feed(state, "block", key, torch.zeros_like(key))
    assert [ranks(state)[token] for token in (0, 1)] == [1, 0]


@SIDES
def test_lag_kv_subtracts_the_lowest_of_the_next_chunk(side, twins, device):
    """In half of the channels the next chunk is from 4 to 5: token 1 is like token 4 of it and has no spread."""
    state = new(twins, side, device, 8, lag=2)
    key = torch.zeros(4, DIM)
    key[2:, ::2] = 4
    key[3] += 1
    key[1] = key[2]
    key[0] = key[2] + 0.5 * PATTERN
    feed(state, "block", key, torch.zeros_like(key))
    assert [ranks(state)[token] for token in (0, 1)] == [1, 0]


@SIDES
@HOW
def test_lag_kv_earlier_ones_of_equal_tokens_have_lower_ranks(side, how, twins, device):
    state = new(twins, side, device, 12, lag=4)
    key = tokens(2.0, 1.0, 2.0, 1.0)
    feed(state, how, key, torch.zeros_like(key))
    assert [ranks(state)[token] for token in range(4)] == [2, 0, 3, 1]


@SIDES
@HOW
def test_lag_kv_evicts_the_lowest_rank_of_all_chunks_the_oldest_first(side, how, twins, device):
    """Chunks of two tokens, of which tokens 1 and 2 have rank 0. The second chunk also ranks by the third."""
    state = new(twins, side, device, 6, lag=2)
    key = torch.cat([tokens(2.0, 1.0), tokens(1.0)])
    key[2:4] = torch.tensor([[0.0], [1.0]])
    key[3] *= 1 + PATTERN
    key[4:] = torch.tensor([[0.0], [1.0]])
    feed(state, how, key, torch.zeros_like(key))
    assert ranks(state) == {0: 1, 1: 0, 2: 0, 3: 1, 4: 2, 5: 2}
    feed(state, how, torch.ones(1, DIM), torch.ones(1, DIM))
    assert sorted(ranks(state)) == [0, 2, 3, 4, 5, 6]
    feed(state, how, torch.ones(1, DIM), torch.ones(1, DIM))
    assert 2 not in ranks(state) and len(ranks(state)) == 6


@SIDES
def test_lag_kv_steps_evict_by_rank_from_any_slot(side, twins, device):
    """The chunk is in slots 20 to 39 of 60, which several tiles hold. Each new token takes the victim's slot and has no
    rank."""
    state = new(twins, side, device, 60, lag=20, sinks=20)
    order = [18, 3, 12, 0, 19]
    spreads = [float(10 + token) for token in range(20)]
    for rank, token in enumerate(order):
        spreads[token] = float(rank + 1)
    key = torch.cat([torch.ones(20, DIM), tokens(*spreads)])
    feed(state, "block", key, torch.zeros_like(key))
    kept = list(range(60))
    for step, token in enumerate(order):
        feed(state, "steps", torch.full((1, DIM), float(step)), torch.full((1, DIM), -float(step)))
        slot = 20 + token
        kept[slot] = 60 + step
        assert state.positions[1, 0, :61].tolist() == [*kept, -1]
        assert state.score[1, 0, slot] == 20 and state.score[1, 0, 60] == -math.inf
        assert (state.key[1, 0, slot] == step).all() and (state.value[1, 0, slot] == -step).all()
        assert state.occupied[1, 0].tolist() == [True] * 60 + [False] * 64


@SIDES
def test_lag_kv_steps_evict_the_oldest_of_equal_ranks_from_any_slot(side, twins, device):
    """All ranks are 0 in chunks of one token. New tokens reuse slots, so the oldest is soon behind newer ones."""
    state = new(twins, side, device, 20, 4, lag=1, sinks=2)
    for token in range(45):
        feed(state, "steps", torch.ones(1, DIM), torch.ones(1, DIM))
        assert sorted(ranks(state)) == [one for one in range(token + 1) if one < 2 or one > token - 18]
    assert set(ranks(state).values()) == {0, 1}


@SIDES
def test_lag_kv_a_step_that_completes_a_chunk_evicts_from_the_one_before_it(side, twins, device):
    """The budget is the least for its lag: no token has a rank before the step."""
    state = new(twins, side, device, 3, lag=2)
    key = tokens(2.0, 1.0)
    feed(state, "block", key[:3], key[:3])
    assert ranks(state) == {0: 2, 1: 2, 2: 2}
    feed(state, "steps", key[3:], key[3:])
    assert ranks(state) == {0: 1, 2: 2, 3: 2}
    feed(state, "steps", key[:1], key[:1])
    assert ranks(state) == {2: 2, 3: 2, 4: 2}
    feed(state, "steps", key[3:], key[3:])
    assert ranks(state) == {3: 1, 4: 2, 5: 2}


@SIDES
def test_lag_kv_a_step_fills_the_first_free_slot(side, twins, device):
    """Tokens with a rank stay while the cache has room. Row 1 has one token less."""
    state = new(twins, side, device, 6, lag=2)
    key = tokens(2.0, 1.0)
    there = torch.tensor([[True] * 4, [True, False, True, True]], device=device)
    feed(state, "block", key, key, there)
    feed(state, "steps", key[:1], key[:1])
    assert state.positions[:, 0, :7].tolist() == [[0, 1, 2, 3, 4, -1, -1], [0, 2, 3, 4, -1, -1, -1]]
    assert ranks(state) == {0: 1, 1: 0, 2: 2, 3: 2, 4: 2}


def test_lag_kv_steps_leave_what_blocks_of_one_token_leave(twins, device):
    """Kernels of their own finish a step. Every buffer has the same bits, behind padding as well."""
    one, other = (new(twins, "optimized", device, 50, 60, lag=9, sinks=3) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randn(2, 48, DIM, generator=generator)
    there = torch.ones(2, 48, dtype=torch.bool, device=device)
    there[1, ::5] = False
    for state in (one, other):
        feed(state, "block", *prompt, there)
    for _ in range(14):
        token = torch.randn(2, 1, DIM, generator=generator)
        feed(one, "steps", *token)
        feed(other, "block", *token)
        for name in ("occupied", "positions", "score", "key", "value", "_token_index", "_valid_seen", "_seen"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@SIDES
def test_lag_kv_ranks_once(side, twins, device):
    """Neither evictions nor later chunks change the rank of a token."""
    state = new(twins, side, device, 9, 4, lag=3)
    generator = torch.Generator().manual_seed(2)
    known: dict[int, int] = {}
    for _ in range(12):
        feed(state, "block", *torch.randn(2, 4, DIM, generator=generator))
        for token, rank in ranks(state).items():
            if rank < 3:
                assert known.setdefault(token, rank) == rank
    assert len(known) > 15


@SIDES
def test_lag_kv_of_scaled_channels_beyond_float32(side, twins, device):
    """A range of 1e-37 scales channels of 1e37 to 1e74. The softmaxes of tokens 0 and 1 are 0 in any type."""
    state = new(twins, side, device, 8, lag=3)
    key = tokens(2.0, 1.0, 3.0)
    key[:3] *= 1e37
    key[3:] *= 1e-37
    feed(state, "block", key, key)
    assert [ranks(state)[token] for token in range(3)] == [1, 0, 2]


def published(key, value, *, sinks, lag, kept):
    """The tokens that the authors' algorithm keeps of one head's prompt [T, D] at once: of each chunk but the last one
    `kept`, the last chunk and what is behind it."""
    count = (len(key) - sinks) // lag
    found = set(range(sinks)) | set(range(sinks + (count - 1) * lag, len(key)))
    for number in range(count - 1):
        first = sinks + number * lag
        score = torch.zeros(lag, dtype=torch.float64)
        for x in (key.double(), value.double()):
            chunk, following = x[first:first + lag], x[first + lag:first + 2 * lag]
            low, high = following.min(0).values, following.max(0).values
            score += ((chunk - low) / (high - low)).std(-1).softmax(0)
        found |= {first + token for token in score.topk(kept).indices.tolist()}
    return found


@SIDES
@pytest.mark.parametrize(("sinks", "lag", "kept", "length"), [(4, 16, 8, 91), (0, 7, 2, 63), (3, 24, 17, 123)])
def test_lag_kv_keeps_of_a_prompt_what_the_published_algorithm_keeps(sinks, lag, kept, length, side, twins, device):
    generator = torch.Generator().manual_seed(length)
    key, value = torch.randn(2, length, DIM, generator=generator)
    expected = published(key, value, sinks=sinks, lag=lag, kept=kept)
    state = new(twins, side, device, len(expected), 128, lag=lag, sinks=sinks)
    feed(state, "block", key, value)
    assert set(ranks(state)) == expected


@given(seed=st.integers(0, 2**31), powers=st.lists(st.integers(-8, 8), min_size=DIM, max_size=DIM))
@few
def test_lag_kv_does_not_depend_on_the_scale_and_the_origin_of_a_channel(seed, powers, twins, device):
    """Channels are multiplied by powers of two, and moved, both without rounding: all ranks remain."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randint(-64, 64, (30, DIM), generator=generator).float()
    moved = key * 2.0 ** torch.tensor(powers) + torch.randint(-64, 64, (DIM,), generator=generator) * 4
    plain, changed = (new(twins, "optimized", device, 12, 9, lag=4, sinks=1) for _ in range(2))
    feed(plain, "block", key, key)
    feed(changed, "block", moved, key)
    assert ranks(plain) == ranks(changed)
