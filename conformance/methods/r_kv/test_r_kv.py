"""R-KV under test: the window's attention to the tokens before it, the similarities of keys, and both in one score:
what only our own sides promise.
"""

from __future__ import annotations

import math

import pytest
import torch

from kvtwin.conformance import stats
from kvtwin.conformance.judge.checkers import r_kv as checker
from kvtwin.conformance.suite.r_kv.test_r_kv import FLOAT64, SIDES, assert_scores, axis, held, new, rows, scores
from kvtwin.reference.baselines import r_kv

pytestmark = pytest.mark.kind("equivalence")

HOW = pytest.mark.parametrize("how", ("steps", "block"))


def feed(state, how, query, key, occupied=None):
    if how == "block":
        state.append_block(query, key, key, occupied)
        return
    for token in range(key.shape[2]):
        state.step(query[:, :, token], key[:, :, token], key[:, :, token])


@SIDES
@HOW
def test_r_kv_evicts_an_older_copy_of_a_key(side, how, twins, device):
    """Tokens 1 to 3 have the same key. Token 3 is left out of the mean of token 2, tokens 1 and 2 of that of token 3:
    the sums of similarities are 2, 1 and 0."""
    state = new(getattr(twins, side).baselines.r_kv, device, 4, 5, window=1, kernel_size=1, mix_lambda=0.0)
    key = rows([axis(3), axis(0), axis(0), axis(0), axis(5)], device)
    feed(state, how, torch.zeros_like(key), key)
    assert held(state) == [0, 2, 3, 4]


@SIDES
@pytest.mark.parametrize("exempts_first", [True, False])
def test_r_kv_redundancy_by_hand(side, exempts_first, twins, device):
    """C_01 = 0.6, C_02 = 0.8, C_12 = 0.48 and C_3j = 0, but for EPSILON. Token 0 is left out of the mean of token 2;
    tokens 1 and 2 are left out of that of token 0. Token 1 is the most redundant."""
    state = new(
        getattr(twins, side).baselines.r_kv, device, 3, 4, window=1, kernel_size=1, mix_lambda=0.0, threshold=0.5,
        exempts_first=exempts_first,
    )
    key = rows([[2.0], [3.0, 4.0], [4.0, 0.0, 3.0], axis(5)], device)
    two, five = 2 + r_kv.EPSILON, 5 + r_kv.EPSILON
    first, second = 6 / (two * five), 12 / five**2
    means = [0.0, (first + second) / 4, second / 4, 0.0]
    total = math.fsum(map(math.exp, means))
    expected = {token: -math.exp(means[token]) / total for token in (0, 2)}
    assert_scores(state, torch.zeros_like(key), key, expected)
    assert held(state) == [0, 2, 3] and scores(state)[3] == math.inf


@SIDES
def test_r_kv_a_token_is_not_similar_to_itself(side, twins, device):
    """With a threshold of 0 all tokens are similar. Tokens 0 to 2 are left out of the mean of token 3, and token 3 of
    that of token 2."""
    state = new(
        getattr(twins, side).baselines.r_kv, device, 3, 4, window=1, kernel_size=1, mix_lambda=0.0, threshold=0.0,
        exempts_first=False,
    )
    key = rows([[2.0], [3.0, 4.0], [4.0, 0.0, 3.0], [2.0, 1.0, 2.0]], device)
    two, three, five = 2 + r_kv.EPSILON, 3 + r_kv.EPSILON, 5 + r_kv.EPSILON
    c01, c02, c03, c12, c13 = 6 / (two * five), 8 / (two * five), 4 / (two * three), 12 / five**2, 10 / (five * three)
    means = [(c01 + c02 + c03) / 4, (c01 + c12 + c13) / 4, (c02 + c12) / 4, 0.0]
    total = math.fsum(map(math.exp, means))
    expected = {token: -math.exp(means[token]) / total for token in (1, 2)}
    assert_scores(state, torch.zeros_like(key), key, expected)
    assert held(state) == [1, 2, 3]


@SIDES
@pytest.mark.parametrize(("exempts_first", "kept"), [(True, [0, 3]), (False, [2, 3])])
def test_r_kv_the_first_token_is_a_sink_without_similar_keys(side, exempts_first, kept, twins, device):
    """Similarities below the threshold: 0.4 between tokens 0 and 1, 0.36 of both to token 2. With the exemption, the
    mean of token 0 is 0. Without it, it ties with token 1, and token 2 is the least redundant of the three."""
    state = new(
        getattr(twins, side).baselines.r_kv, device, 2, 4, window=1, kernel_size=1, mix_lambda=0.0,
        exempts_first=exempts_first,
    )
    a, b = math.sqrt(0.4), math.sqrt(0.6)
    key = rows([[a, b], [a, 0.0, b], [0.9 * a, 0.0, 0.0, math.sqrt(1 - 0.324)], axis(9)], device)
    feed(state, "block", torch.zeros_like(key), key)
    assert held(state) == kept


@SIDES
@HOW
def test_r_kv_takes_the_largest_logit_of_a_group(side, how, twins, device):
    """Token 1 has the largest logit of the second head and the smallest of the first; on average token 0 leads."""
    state = new(getattr(twins, side).baselines.r_kv, device, 2, 4, heads=2, window=1, kernel_size=1, mix_lambda=1.0)
    key = rows([axis(0, 8.0), axis(1, 8.0), axis(2, 8.0), axis(3, 8.0)], device)
    query = torch.zeros(2, 2, 4, 16, device=device)
    query[..., 0] = 1
    query[:, 0, :, 1], query[:, 1, :, 1] = -8, 8
    feed(state, how, query, key)
    assert held(state) == [1, 3]


@SIDES
def test_r_kv_the_window_is_not_in_the_softmax(side, twins, device):
    """The window's queries attend most to the window. Of the tokens before it, token 1 has the larger logit, by 1."""
    state = new(getattr(twins, side).baselines.r_kv, device, 3, 4, window=2, kernel_size=1, mix_lambda=1.0)
    key = rows([axis(0), axis(1), axis(2, 40.0), axis(2, 40.0)], device)
    query = rows([axis(2, 40.0)] * 4, device)
    query[..., 1] = 4
    assert_scores(state, query, key, {1: math.e / (1 + math.e)})
    assert held(state) == [1, 2, 3]


@SIDES
def test_r_kv_pools_by_age(side, twins, device):
    """A max pool of 3 gives token 4 the importance of token 6, which follows it. Token 6 is in slot 0, next to token 1.
    """
    state = new(getattr(twins, side).baselines.r_kv, device, 5, 1, window=1, kernel_size=3, mix_lambda=1.0)
    key = rows([axis(token, 8.0) for token in range(8)], device)
    query = rows([axis(2, 8.0)] * 7 + [axis(6, 8.0)], device)
    feed(state, "steps", query[:, :, :7], key[:, :, :7])
    assert held(state) == [1, 2, 3, 4, 6]
    feed(state, "steps", query[:, :, 7:], key[:, :, 7:])
    assert held(state) == [2, 3, 4, 6, 7]


@SIDES
def test_r_kv_the_pool_ends_before_the_window(side, twins, device):
    """A block had more tokens before its window, of which the last was important. Then a step attends to token 3."""
    state = new(getattr(twins, side).baselines.r_kv, device, 4, 6, window=1, kernel_size=3, mix_lambda=1.0)
    key = rows([axis(token, 20.0) for token in range(7)], device)
    query = rows([axis(4, 20.0)] * 6 + [axis(3, 20.0)], device)
    feed(state, "block", query[:, :, :6], key[:, :, :6])
    assert held(state) == [2, 3, 4, 5]
    feed(state, "steps", query[:, :, 6:], key[:, :, 6:])
    assert held(state) == [2, 3, 4, 6]


ORDERS = pytest.mark.parametrize("order", r_kv.ORDERS)


def after_a_step(module, device, order, query, key, budget, **options):
    """What is held after a block of all tokens but the last, which evicts, and a step of the last, which evicts."""
    state = new(module, device, budget, key.shape[2] - 1, window=1, order=order, **options)
    feed(state, "block", query[:, :, :-1], key[:, :, :-1])
    before = held(state)
    feed(state, "steps", query[:, :, -1:], key[:, :, -1:])
    return before, held(state)


@SIDES
@ORDERS
def test_r_kv_pools_in_its_order(side, order, twins, device):
    """Pooled, tokens 3 to 5 lead and token 1 follows, then token 6 was the window. The step attends to token 1 and less
    to token 5: in the order 3, 4, 5, 1, 6, only token 3 has no important neighbour."""
    key = rows([axis(token, 8.0) for token in range(8)], device)
    query = torch.zeros_like(key)
    query[:, :, 6, 4], query[:, :, 6, 0], query[:, :, 7, 1], query[:, :, 7, 5] = 8, 4, 8, 4
    module = getattr(twins, side).baselines.r_kv
    before, after = after_a_step(module, device, order, query, key, 5, kernel_size=3, mix_lambda=1.0)
    assert before == [1, 3, 4, 5, 6]
    assert after == ([1, 4, 5, 6, 7] if order == "score" else [1, 3, 5, 6, 7])


@SIDES
@ORDERS
def test_r_kv_the_first_in_its_order_is_a_sink(side, order, twins, device):
    """Tokens 0 and 2 have a similarity of 0.4, below the threshold, and the score of token 2 is the highest."""
    a, b = math.sqrt(0.4), math.sqrt(0.6)
    key = rows([[a, b], [a, 0.0, b], [a, 0.0, 0.0, b], axis(9), axis(10)], device)
    query = torch.zeros_like(key)
    query[:, :, 3, 3], query[:, :, 3, 1] = 40, 20
    module = getattr(twins, side).baselines.r_kv
    before, after = after_a_step(module, device, order, query, key, 3, kernel_size=1, mix_lambda=0.5)
    assert before == [0, 2, 3]
    assert after == ([2, 3, 4] if order == "score" else [0, 3, 4])


@SIDES
@ORDERS
def test_r_kv_the_last_similar_token_in_its_order_is_exempt(side, order, twins, device):
    """Tokens 0 to 2 are copies, and the scores of newer copies are higher. The last copy, the oldest in the order of
    scores, and the one before it leave out a similarity."""
    key = rows([axis(0), axis(0), axis(0), axis(3), axis(5), axis(6)], device)
    query = torch.zeros_like(key)
    query[:, :, 4, 0] = 8
    module = getattr(twins, side).baselines.r_kv
    before, after = after_a_step(module, device, order, query, key, 4, kernel_size=1, mix_lambda=0.5)
    assert before == [0, 1, 2, 4]
    assert after == ([0, 1, 4, 5] if order == "score" else [1, 2, 4, 5])


@SIDES
@HOW
def test_r_kv_keeps_the_window(side, how, twins, device):
    """The last two tokens are copies, which nobody attends to."""
    state = new(getattr(twins, side).baselines.r_kv, device, 3, 6, window=2, kernel_size=1, mix_lambda=0.5)
    key = rows([axis(0), axis(1), axis(2), axis(3), axis(4), axis(4)], device)
    feed(state, how, torch.zeros_like(key), key)
    assert held(state)[-2:] == [4, 5]
    assert [scores(state)[token] for token in (4, 5)] == [math.inf] * 2


@SIDES
def test_r_kv_padding_does_not_observe(side, twins, device):
    """In row 1, the last token is padding, whose query attends to token 1; token 2 is its window. The mean over its
    query gives token 0 nearly 1."""
    state = new(getattr(twins, side).baselines.r_kv, device, 2, 4, window=2, kernel_size=1, mix_lambda=1.0)
    key = rows([axis(0, 8.0), axis(1, 8.0), axis(2, 8.0), axis(3, 8.0)], device)
    query = rows([axis(0, 8.0), axis(0, 8.0), axis(0, 8.0), axis(1, 8.0)], device)
    occupied = torch.tensor([[True] * 4, [True, True, True, False]], device=device)
    feed(state, "block", query, key, occupied)
    assert held(state, 1) == [0, 2]
    assert float(state.score[1, 0][state.positions[1, 0] == 0]) > 0.9


@SIDES
@pytest.mark.parametrize("length", [1e30, 1e19, 1e-19, 2.0**-71])
def test_r_kv_keys_of_any_length_are_compared(side, length, twins, device):
    """Squares of such numbers overflow or underflow. EPSILON makes keys that are shorter than 1e-8 similar to none."""
    state = new(getattr(twins, side).baselines.r_kv, device, 4, 5, window=1, kernel_size=1, mix_lambda=0.0)
    key = rows([axis(2), [length], [length], [length], axis(3)], device)
    means = [0.0, 0.4, 0.2, 0.0, 0.0] if length > 1 else [0.0] * 5
    expected = {2: -math.exp(means[2]) / math.fsum(map(math.exp, means))}
    assert_scores(state, torch.zeros_like(key), key, expected)
    assert held(state) == ([0, 2, 3, 4] if length > 1 else [1, 2, 3, 4])


@SIDES
def test_r_kv_a_long_first_key_is_exempt(side, twins, device):
    """Token 0 has the similarities 2/7 and 3/7 to tokens 1 and 2, which are orthogonal and left out of its mean."""
    state = new(getattr(twins, side).baselines.r_kv, device, 3, 4, window=1, kernel_size=1, mix_lambda=0.0)
    key = rows([[number * 2.0**83 for number in (2, 3, 6)], [1.0], [0.0, 1.0], axis(9)], device)
    one = 1 + r_kv.EPSILON
    total = math.fsum(map(math.exp, (0.0, 2 / (28 * one), 3 / (28 * one), 0.0)))
    assert_scores(state, torch.zeros_like(key), key, {0: -1 / total})
    assert held(state) == [0, 1, 3]


@SIDES
@pytest.mark.parametrize(("exempts_first", "first"), [(True, 0), (False, 1)])
def test_r_kv_either_choice_is_right_at_a_similarity_threshold(side, exempts_first, first, twins, device):
    """Two keys have a similarity of 0.5 up to rounding, and no other is similar: right answers are not refused."""
    generator = torch.Generator().manual_seed(1)
    module = getattr(twins, side).baselines.r_kv
    for offset in (-2e-8, 2e-8):
        config = r_kv.RKVConfig(
            3, 5, window=1, kernel_size=1, mix_lambda=0.0, threshold=0.5 + offset, exempts_first=exempts_first
        )
        sizes = {"batch": 64, "query_heads": 1, "key_value_heads": 1, "head_dim": 16}
        tested = module.RKVState(config, dtype=torch.float32, device=device, **sizes)
        truth = r_kv.RKVState(config, dtype=torch.float64, device=device, **sizes)
        key = torch.zeros(64, 1, 5, 16)
        for token in range(5):
            key[..., token, 2 + token] = 1
        key[:, :, first:first + 2] = 0
        key[:, :, first, 0] = 1
        key[:, :, first + 1, :2] = torch.tensor([0.5, 3**0.5 / 2])
        key[:, :, first:first + 2] *= torch.rand(64, 1, 2, 1, generator=generator) + 0.1         # rounds otherwise
        key = key.to(device)
        query = torch.zeros_like(key)
        with stats.collect():                                       # few of these decisions are decisive, on purpose
            checker.Adapter().prefill(tested, truth, {"query": query, "key": key, "value": key, "occupied": None})


def test_r_kv_redundancy_sums_to_one(device):
    """Of the tokens of a head, whatever is exempt."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, 3, 12, 16, generator=generator, dtype=torch.float64)
    occupied = torch.rand(2, 3, 12, generator=generator) < 0.8
    positions = torch.arange(12).expand(2, 3, 12)
    for exempts_first in (True, False):
        found = r_kv.redundancy(key, occupied, positions, threshold=0.2, exempts_first=exempts_first)
        assert float((found.sum(-1) - 1).abs().max()) <= FLOAT64
        assert bool((found[~occupied] == 0).all())
