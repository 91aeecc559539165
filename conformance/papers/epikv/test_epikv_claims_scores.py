"""The claims of EpiKV's paper about its scores: that they are causal, independent of position, and well defined.

Both twins are tested, the reference in float64 and the optimized side in float32. u is the unit roundoff of the type.
A z-score of w values in two passes has a relative error of at most 64 w u max |g| / sigma, if the values are exact.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases.draws import at_least
from kvtwin.reference.epikv import rolling_zscore, score, select

pytestmark = pytest.mark.kind("claims")

F64 = torch.float64
few = settings(max_examples=max(at_least(4), settings().max_examples // 2))


@dataclass(frozen=True)
class Side:
    """An implementation, the type in which it is tested, its unit roundoff, and its device."""

    module: Any
    dtype: torch.dtype
    u: float
    device: torch.device

    def tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values).to(self.device, self.dtype)

    def slack(self, window: int, largest: float, sigma: float) -> float:
        return 64 * window * self.u * largest / sigma


@pytest.fixture(scope="module", params=["reference", "optimized"])
def epikv(request, twins, device):
    types = {"reference": (F64, 2.0**-53), "optimized": (torch.float32, 2.0**-24)}
    return Side(getattr(twins, request.param).epikv, *types[request.param], device)


def numbers(seed: int, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# EK-5 and 6: values of z-scores --------------------------------------------------------------------------------------


@pytest.mark.claim("EK-5a")
@given(seed=st.integers(0, 2**31 - 1), window=st.integers(2, 64), size=st.sampled_from((1.0, 1e6)))
@few
def test_z_scores_are_bounded(epikv, seed, window, size):
    """|z| <= sqrt(w - 1), 7.94 for w = 64. Let d_t = g_t - mu. The other deviations sum to -d_t, so sigma^2 >=
    (d_t^2 + d_t^2 / (w - 1)) / w."""
    g = size * numbers(seed, 1, 90, dtype=epikv.dtype)
    g[0, 70:72] *= torch.tensor([40.0, 1e5], dtype=epikv.dtype)
    z = epikv.module.rolling_zscore(g.to(epikv.device), window).cpu().double()
    values = g.double().unfold(-1, window, 1)
    sigma = values.std(-1, correction=0)
    slack = 64 * window * epikv.u * values.amax(-1) / sigma
    assert bool((z[:, window - 1:].abs() <= math.sqrt(window - 1) * (1 + slack)).all())


@pytest.mark.claim("EK-5a")
def test_the_bound_is_attained_and_less_is_no_bound(epikv):
    g = epikv.tensor([[0.0] * 63 + [3.0]])
    z = float(epikv.module.rolling_zscore(g, 64)[0, -1])
    assert abs(z / math.sqrt(63) - 1) <= epikv.slack(64, 3, 3 * math.sqrt(63) / 64)
    assert not z <= 63 / 8, "7.875 is the bound if the deviation divides by n - 1"
    assert not z <= 0.99 * math.sqrt(63)


@pytest.mark.claim("EK-5b")
def test_the_first_z_scores(epikv):
    """The first z-score is 0 and the second is +-1, whatever the size of the change. So the scores of the first two
    tokens carry little information."""
    for other in (1 + 2.0**-10, 2.0, 2.0**30):
        z = epikv.module.rolling_zscore(epikv.tensor([[1.0, other, 5.0]]), 64)[0]
        assert float(z[0]) == 0
        assert abs(abs(float(z[1])) - 1) <= epikv.slack(2, other, (other - 1) / 2) < 0.1
        assert abs(abs(float(z[2])) - 1) > 0.1, "the third z-score depends on the values"


@pytest.mark.claim("EK-5c")
def test_without_its_own_value_in_the_window_there_is_no_bound(epikv):
    before = torch.tensor([1.0, 1.1, 0.9, 1.0], dtype=F64)
    found = [float((new - before.mean()) / before.std(correction=0)) for new in (10.0, 1e3, 1e6)]
    assert found[0] > math.sqrt(63)
    assert found[2] > 1e6
    within = epikv.module.rolling_zscore(epikv.tensor([[*before.tolist(), 1e6]]), 5)[0, -1]
    assert float(within) <= 2 * (1 + epikv.slack(5, 1e6, 4e5))                           # sigma = 1e6 sqrt(4) / 5


@pytest.mark.claim("EK-6a")
@given(seed=st.integers(0, 2**31 - 1), exponent=st.integers(-3, 6), shift=st.integers(0, 10))
@few
def test_z_scores_know_neither_scale_nor_shift(epikv, seed, exponent, shift):
    """The numbers, multiplied by a power of two and shifted by an integer, are exact in float32. |z| < 4."""
    g, scale = 1 + torch.randint(1024, (1, 40), generator=torch.Generator().manual_seed(seed)) / 1024, 2.0**exponent
    z, other, squared = (
        epikv.module.rolling_zscore(epikv.tensor(x), 16).cpu()[:, 15:].double() for x in (g, scale * g + shift, g * g)
    )
    sigma = float(g.double().unfold(-1, 16, 1).std(-1, correction=0).min())
    slack = 4 * (epikv.slack(16, 2, sigma) + epikv.slack(16, 2 * scale + shift, scale * sigma))
    assert float((z - other).abs().max()) <= slack
    wide = 4 * (epikv.slack(16, 2, sigma) + epikv.slack(16, 4, sigma))                   # squares vary more
    assert float((z - squared).abs().max()) > wide, "a map that is not linear changes the score"
    means = [epikv.module.rolling_mean(epikv.tensor(x), 16) for x in (g, scale * g + shift + 1)]
    assert not torch.equal(*means), "means do change"


def trend(length: int) -> float:
    """The z-score of the last of `length` values on a line."""
    return math.sqrt(3 * (length - 1) / (length + 1))


@pytest.mark.claim("EK-6b")
@pytest.mark.parametrize("slope", [2.0**-10, 1.0, 250.0])
def test_a_line_has_one_z_score(epikv, slope):
    """z = sqrt(3 (n - 1) / (n + 1)) for a window of n values, 1.705 for n = 64, whatever the slope. It is constant once
    the window is full. The deviation of n values on a line is slope sqrt((n^2 - 1) / 12)."""
    line = slope * torch.arange(7, 107, dtype=F64)
    z, falling = epikv.module.rolling_zscore(epikv.tensor(torch.stack((line, line.flip(0)))), 64).tolist()
    for t in range(1, 100):
        length = min(t + 1, 64)
        sigma = math.sqrt((length**2 - 1) / 12)
        assert abs(z[t] / trend(length) - 1) <= epikv.slack(length, 7 + t, sigma)
        assert abs(falling[t] / trend(length) + 1) <= epikv.slack(length, 106, sigma)
    assert round(trend(64), 3) == 1.705
    assert abs(z[-1] / (trend(64) * math.sqrt(63 / 64)) - 1) > epikv.slack(64, 106, sigma), "not with n - 1"


@pytest.mark.claim("EK-6c")
def test_the_first_tokens_are_kept_whatever_they_contain(epikv):
    """The trends that the paper reports: band A falls and band B rises. The scores of the first tokens are -2 trend(n),
    further apart than twice their errors."""
    first = 10
    t = torch.arange(100, dtype=F64)
    scores = epikv.module.score(epikv.tensor(100 - t)[None], epikv.tensor(2 * t)[None])
    errors = [2 * epikv.slack(n, 100, math.sqrt((n**2 - 1) / 12)) * trend(n) for n in range(2, first + 2)]
    assert all(2 * (trend(n + 1) - trend(n)) > 2 * errors[n - 2] for n in range(2, first + 1))
    kept = epikv.module.select(scores, 64, prompt=0, recent=0)[0].tolist()
    assert kept[:first] == list(range(first))


@pytest.mark.claim("EK-6c")
def test_position_is_not_removed_in_the_first_window():
    """The same in float64, for all tokens. The scores are 0, -2, -2.45, ..., -3.41, so the first tokens have the
    highest scores."""
    t = torch.arange(300, dtype=F64)
    s = score((50 - 0.1 * t)[None], (10 + 0.2 * t)[None])[0]
    assert [round(float(x), 2) for x in (s[0], s[1], s[2], s[63])] == [0.0, -2.0, -2.45, -3.41]
    assert bool((s[1:64] < s[:63]).all())
    kept = select(s[None], 64, prompt=0, recent=0)[0].tolist()
    assert kept[:40] == list(range(40))
    later = s[64:]
    assert float(later.max() - later.min()) < 1e-6, "a linear trend is removed after the first window"


@pytest.mark.claim("EK-6d")
def test_curved_trends_remain(epikv):
    """A power law, which g may follow. Its z-score goes from -0.80 to -1.70 over 2000 tokens."""
    count = 2000 if epikv.dtype == F64 else 200                                          # the interpreter is slow
    g = (1 + torch.arange(count, dtype=F64)).pow(-1.0)[None]
    z = epikv.module.rolling_zscore(epikv.tensor(g), 64)[0, 63:]
    assert float(z.max() - z.min()) > 0.5
    assert float(z[-1]) < float(z[0])
    line = epikv.module.rolling_zscore(epikv.tensor((count - torch.arange(count))[None]), 64)[0, 63:]
    assert float(line.max() - line.min()) <= 2 * trend(64) * epikv.slack(64, count, math.sqrt((64**2 - 1) / 12)) < 0.1


@pytest.mark.claim("EK-6e")
def test_raw_scores_track_position(epikv):
    """Rolling means of the same trends: the score falls by at least 1/16 with every token, so only the first tokens are
    kept. Means of up to 64 numbers below 128 have errors of less than 64 * 128 u = 2^-11 in float32."""
    t = torch.arange(300 if epikv.dtype == F64 else 100, dtype=F64)
    kept = []
    for trend_of in (1, 0):
        bands = (epikv.tensor(x)[None] for x in (50 - trend_of * t / 8, 10 + trend_of * t / 4))
        scores = epikv.module.score(*bands, policy="hs_variance")
        kept.append(epikv.module.select(scores, 32, prompt=0, recent=0)[0].tolist())
    assert kept[0] == list(range(32))
    assert kept[1] != list(range(32)), "without a trend, others are kept"


# EK-7 and 8: frozen scores -------------------------------------------------------------------------------------------


@pytest.mark.claim("EK-7a")
@given(seed=st.integers(0, 2**31 - 1), cut=st.integers(2, 79))
@few
def test_scores_do_not_depend_on_the_future(seed, cut):
    g = numbers(seed, 2, 1, 80)
    assert torch.equal(score(g[0], g[1], window=16)[:, :cut], score(g[0, :, :cut], g[1, :, :cut], window=16))
    whole = (g[0] - g[0].mean(-1, keepdim=True)) / g[0].std(-1, keepdim=True)
    part = g[0, :, :cut]
    part = (part - part.mean(-1, keepdim=True)) / part.std(-1, keepdim=True)
    assert not torch.equal(whole[:, :cut], part), "z-scores over the whole trace depend on the future"


@pytest.mark.claim("EK-7b")
def test_later_scores_decide_whether_a_token_is_kept(epikv):
    """With a budget of 1, the score of the second token decides whether the first token is kept."""
    fates = [
        epikv.module.select(epikv.tensor([later]), 1, prompt=0, recent=0).tolist() for later in ([1.0, 0.0], [1.0, 2.0])
    ]
    assert fates == [[[0]], [[1]]]


@pytest.mark.claim("EK-7c")
def test_eviction_order_is_fixed_by_the_scores(epikv):
    """The order in which tokens are evicted is fixed as soon as their scores are known."""
    scores = epikv.tensor([[3.0, 1.0, 2.0, 5.0, 4.0]])
    kept = [epikv.module.select(scores[:, :end], 2, prompt=0, recent=0)[0].tolist() for end in range(3, 6)]
    left = [set(range(end)) - set(stays) for end, stays in enumerate(kept, start=3)]
    assert left == [{1}, {1, 2}, {0, 1, 2}]
    assert all(one < other for one, other in itertools.pairwise(left)), "an evicted token never returns"


@pytest.mark.claim("EK-7d")
def test_recomputed_scores_differ(epikv):
    """Section 3.3 freezes scores. In section 4.4, KV policies recompute them over the whole cache at each step. The
    rolling mean over the tokens in the cache differs from the one over all tokens seen."""
    variance = epikv.tensor([[1.0, 9.0, 1.0, 5.0, 2.0]])
    frozen = epikv.module.rolling_mean(variance, 3)
    held = [0, 1, 3, 4]                                                                  # token 2 was evicted
    recomputed = epikv.module.rolling_mean(variance[:, held], 3)
    assert not torch.equal(frozen[:, held], recomputed)
    assert torch.equal(frozen[:, :2], recomputed[:, :2])


def stream(scores: list[int], budget: int, recent: int, tie: Any) -> list[set[int]]:
    """Evict token by token: the lowest score outside the newest `recent` tokens."""
    held: list[int] = []
    seen = []
    for t in range(len(scores)):
        held.append(t)
        if len(held) > budget:
            candidates = [u for u in held if u <= t - recent]
            held.remove(min(candidates, key=lambda u: (scores[u], tie(u))))
        seen.append(set(held))
    return seen


@pytest.mark.claim("EK-8a")
@given(
    scores=st.lists(st.integers(0, 5), min_size=1, max_size=40), budget=st.integers(1, 12), recent=st.integers(1, 4)
)
@settings(max_examples=200)
def test_streaming_is_offline_selection(scores, budget, recent):
    """If scores are frozen and one total order breaks ties. By induction, a token that streaming evicts has `budget`
    other tokens above it, at this and every later step."""
    recent = min(recent, budget)
    tensor = torch.tensor([scores], dtype=F64)
    for t, held in enumerate(stream(scores, budget, recent, tie=lambda u: u)):
        assert held == set(select(tensor[:, :t + 1], budget, prompt=0, recent=recent)[0].tolist())


@pytest.mark.claim("EK-8a")
def test_streaming_with_other_ties_differs_from_offline_selection():
    offline = set(select(torch.zeros(1, 5, dtype=F64), 2, prompt=0, recent=1)[0].tolist())
    assert stream([0] * 5, 2, 1, tie=lambda u: -u)[-1] != offline == stream([0] * 5, 2, 1, tie=lambda u: u)[-1]


# EK-9: constant windows ----------------------------------------------------------------------------------------------


def one_pass(g: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every prefix, from running sums in float32, as E[g^2] - mu^2."""
    count = torch.arange(1, g.shape[-1] + 1, dtype=torch.float32)
    total, squares = torch.zeros(g.shape[0]), torch.zeros(g.shape[0])
    means, variances = [], []
    for place in range(g.shape[-1]):
        total, squares = total + g[:, place], squares + g[:, place].square()
        means.append(total / count[place])
        variances.append(squares / count[place] - means[-1].square())
    return torch.stack(means, 1), torch.stack(variances, 1)


@pytest.mark.claim("EK-9a")
def test_epsilon_does_not_make_a_constant_window_safe():
    """Equation 3 with running sums in float32 gives negative variances, which have no root, and scores that are only
    rounding errors."""
    g = (0.1 + 0.01 * torch.arange(64).float())[:, None].expand(-1, 64)
    means, variances = one_pass(g)
    negative = float((variances < 0).float().mean())
    assert 0.12 < negative < 0.83
    z = (g - means) / (variances.clamp_min(0).sqrt() + 1e-9)
    assert float(z.abs().max()) > 0.1
    assert bool((rolling_zscore(g, 64) == 0).all())


@pytest.mark.claim("EK-9b")
@given(value=st.floats(2.0**-20, 2.0**20, width=32), window=st.integers(1, 64))
@few
def test_two_passes_and_a_threshold_give_0(value, window):
    """Rounding gives equal values a deviation of at most about w u relative to them. The threshold is 4 w u."""
    for dtype in (torch.float32, F64):
        assert bool((rolling_zscore(torch.full((1, 70), value, dtype=dtype), window) == 0).all())
    moving = torch.full((1, 70), value, dtype=F64)
    moving[0, ::2] *= 1 + 2.0**-10
    assert window == 1 or bool((rolling_zscore(moving, window)[0, window:] != 0).any()), "others must not score 0"


# EK-10: lags ---------------------------------------------------------------------------------------------------------


def two_chunks(seed: int, epikv: Side) -> tuple[Tensor, Tensor]:
    """Keys and values that are multiples of 2^-10, so that shifts by such multiples are exact in float32."""
    both = torch.randint(-3072, 3072, (2, 1, 2, 8, 16), generator=torch.Generator().manual_seed(seed)) / 1024
    return epikv.tensor(both[0]), epikv.tensor(both[1])


def lag_slack(epikv: Side, *chunks: Tensor) -> float:
    """The error of scores of numbers up to 16, divided by the smallest range of a channel in the first chunk, of 4."""
    width = min(float((x[:, :, :4].amax(2) - x[:, :, :4].amin(2)).min()) for x in chunks)
    return 2.0**12 * epikv.u * 16 / width**2


def lagging_apart(seed: int, epikv: Side) -> tuple[Tensor, Tensor]:
    """The same, with ranges of at least 2 in the first chunk."""
    key, value = two_chunks(seed, epikv)
    for x in (key, value):
        x[:, :, 0], x[:, :, 1] = -1 - x[:, :, 0].abs() / 2, 1 + x[:, :, 1].abs() / 2
    return key, value


@pytest.mark.claim("EK-10a")
@given(seed=st.integers(0, 2**31 - 1))
@few
def test_scale_and_shift_of_all_chunks_are_removed(epikv, seed):
    """A factor and a shift per channel, the same in both chunks. Factors are powers of two."""
    lag, (key, value) = epikv.module.lag_kv, lagging_apart(seed, epikv)
    factor = epikv.tensor(torch.exp2(torch.arange(16).remainder(5) - 2.0))
    shift = epikv.tensor(torch.arange(-8, 8) / 4)
    one, other = lag(key, value, chunk=4), lag(factor * key + shift, factor * value - shift, chunk=4)
    assert bool(((one - other)[:, 4:].abs() <= lag_slack(epikv, key, value)).all())
    assert torch.equal(lag(factor * key, factor * value, chunk=4), one)
    # A scale or a shift of the second chunk alone is not removed: not by the range, nor by the minimum, of its own.
    for scale, offset in ((factor, 0), (1, shift)):
        moved = torch.cat((key[:, :, :4], key[:, :, 4:] * scale + offset), 2)
        assert bool(((one - lag(moved, value, chunk=4))[:, 4:].abs() > 2 * lag_slack(epikv, key, value)).any())


@pytest.mark.claim("EK-10b")
def test_a_shift_between_chunks_is_scored(epikv):
    """Lags do not remove a magnitude shift that begins with a new chunk, as channels differ in their ranges."""
    lag, (key, value) = epikv.module.lag_kv, lagging_apart(1, epikv)
    key[..., ::2] /= 8
    moved = key.clone()
    moved[:, :, 4:] += 10.0
    plain, shifted = lag(key, value, chunk=4), lag(moved, value, chunk=4)
    assert bool((shifted[:, 4:] > 2 * plain[:, 4:]).all())
    everywhere = lag(key + 10.0, value, chunk=4)
    assert bool(((everywhere - plain)[:, 4:].abs() <= lag_slack(epikv, key, value)).all())


@pytest.mark.claim("EK-10c")
def test_a_channel_without_range(epikv):
    """Dividing a constant channel by its range gives no finite number, and dividing by range + 1e-6 gives one that
    outweighs all others. Leaving the channel out has no effect on the rest."""
    key, _ = lagging_apart(2, epikv)
    key[..., 3] = 1.0
    key[:, :, 6, 3] = 1.5                                                                # it changes in the next chunk
    low, high = key[0, :, :4].amin(1), key[0, :, :4].amax(1)
    raw = (key[0, :, 4:] - low[:, None]) / (high - low)[:, None]
    assert not bool(raw.isfinite().all())
    padded = ((key[0, :, 4:] - low[:, None]) / (high - low + 1e-6)[:, None]).std(-1, correction=0)
    assert float(padded[:, 2].min()) > 1e4
    others = key[..., [channel for channel in range(16) if channel != 3]].contiguous()
    difference = (epikv.module.lag_kv(key, key, chunk=4) - epikv.module.lag_kv(others, others, chunk=4))[:, 4:]
    assert float(difference.abs().max()) <= lag_slack(epikv, others), "the same except for the order of summation"


@pytest.mark.claim("EK-10d")
def test_a_first_chunk_has_nothing_to_be_compared_with(epikv):
    found = epikv.module.lag_kv(*two_chunks(3, epikv), chunk=4)
    assert bool((found[:, :4] == math.inf).all())
    assert bool(found[:, 4:].isfinite().all())


# EK-14: positions after an eviction ----------------------------------------------------------------------------------


def turned(vector: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """Rotary embedding of [D] in pairs (d, d + D / 2)."""
    half = vector.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=F64) / half)
    one, other = vector[:half], vector[half:]
    return torch.cat((one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()))


@pytest.mark.claim("EK-14a")
def test_a_position_from_the_retained_length_is_wrong():
    """In appendix H, the cache counts the tokens that it retains. Then the query of token 10,000 is rotated as if its
    position were 2048. A key stored at position 9000 is 6952 positions ahead of it, instead of 1000 behind."""
    query = torch.linspace(-1, 2, 64, dtype=F64)
    key = torch.linspace(2, -1, 64, dtype=F64)
    right = turned(query, 10_000) @ turned(key, 9_000)
    wrong = turned(query, 2_048) @ turned(key, 9_000)
    assert abs(float(right - turned(query, 1_000) @ key)) < 1e-8
    assert abs(float(wrong - turned(query, 2_048 - 9_000) @ key)) < 1e-8
    assert abs(float(right - wrong)) > 1


@pytest.mark.claim("EK-14b")
def test_positions_of_tokens_seen_are_right():
    """If the cache counts the tokens seen, the logits of its tokens equal those of a cache that never evicts."""
    query, keys = torch.linspace(-1, 2, 64, dtype=F64), torch.eye(64, dtype=F64)[:5]
    seen = [turned(query, 5) @ turned(key, place) for place, key in enumerate(keys)]
    held = [0, 3, 4]
    assert [turned(query, 5) @ turned(keys[place], place) for place in held] == [seen[place] for place in held]
    moved = [turned(query, 3) @ turned(keys[place], place) for place in held]
    assert moved != [seen[place] for place in held]
