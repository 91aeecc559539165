"""EpiKV's scores of sequences against float64, their exact properties, and `select` against plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases import strategies
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.checkers import epikv_scores as judge
from kvtwin.conformance.judge.checkers.epikv import assert_inside
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.reference.contract.epikv.config import DIFFERENCES, SPREADS, EpiKVConfig

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.main]

few = settings(max_examples=max(at_least(4), settings().max_examples // 4))
KINDS = ("ordinary", "constant", "nearly constant", "ramp", "spike", "zeros", "large", "tiny")


@dataclass(frozen=True)
class Series:
    """Numbers per token [B, L, T], with optional padding."""

    batch: int
    layers: int
    tokens: int
    kind: str
    padding: str
    seed: int
    device: str

    def make(self) -> tuple[Tensor, Tensor | None]:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        shape = (self.batch, self.layers, self.tokens)
        noise = torch.rand(shape, generator=generator, device=self.device)
        index = torch.arange(self.tokens, device=self.device).float().expand(shape)
        made = {
            "ordinary": 10 + noise, "constant": torch.full_like(noise, 0.7), "zeros": torch.zeros_like(noise),
            "nearly constant": 3 * (1 + (8 * noise).round() * 2.0**-20), "ramp": 5 + index / 7,
            "spike": torch.where(index == self.tokens // 2, 1e6, noise), "large": 1e18 * noise, "tiny": 1e-18 * noise,
        }[self.kind]
        if self.padding == "none":
            return made, None
        start = torch.randint(self.tokens, (self.batch, 1), generator=generator, device=self.device)
        occupied = torch.arange(self.tokens, device=self.device) >= start
        if self.padding == "holes":
            occupied = torch.rand(self.batch, self.tokens, generator=generator, device=self.device) < 0.6
        return made.masked_fill(~occupied[:, None], torch.nan), occupied


def series() -> st.SearchStrategy[Series]:
    return st.builds(
        Series, st.integers(1, 2), st.integers(1, 2), st.integers(1, 20), st.sampled_from(KINDS),
        st.sampled_from(("none", "left", "holes")), st.integers(0, 2**31 - 1),
        st.just(str(strategies.default_device())),
    )


def values_of(g: Tensor, occupied: Tensor | None) -> judge.Values:
    there = torch.ones_like(g[:, 0], dtype=torch.bool) if occupied is None else occupied
    exact = g.double().masked_fill(~there[:, None], 0)
    return judge.Values(exact, torch.zeros_like(exact), there)


@pytest.fixture(scope="session", params=("reference", "optimized"))
def side(request, twins):
    return getattr(twins, request.param).epikv


# Within bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@example(case=Series(2, 2, 12, "ordinary", "left", 1, str(strategies.default_device())), window=4)
@example(case=Series(2, 2, 12, "ordinary", "holes", 1, str(strategies.default_device())), window=4)
@given(case=series(), window=st.sampled_from((4, 1, 2, 7, 64)))
@few
def test_rolling_means_and_z_scores(case, window, twins):
    """For any numbers. If they are nearly equal, rounding decides whether a z-score is 0 or the one of float64."""
    g, occupied = case.make()
    values = values_of(g, occupied)
    for zscore, name in ((False, "rolling_mean"), (True, "rolling_zscore")):
        found = judge.rolled_interval(values, window, zscore=zscore)
        actual = getattr(twins.optimized.epikv, name)(g, window, occupied=occupied)
        assert actual.dtype == torch.float32
        assert_inside(actual, found, what=name)
        clean = values.exact if occupied is None else g.double()
        assert_inside(getattr(twins.reference.epikv, name)(clean, window, occupied=occupied), found, what="the oracle")


@pytest.mark.property("accuracy")
@given(case=series(), policy=st.sampled_from(DIFFERENCES))
@few
def test_scores_of_two_bands(case, policy, twins):
    g, occupied = case.make()
    other = g.flip(1).roll(1, 0) if case.padding == "none" else g.flip(1)
    found = judge.difference_interval(*(
        judge.rolled_interval(values_of(x, occupied), 5, zscore=policy != "hs_variance") for x in (g, other[:, :1])
    ))
    actual = twins.optimized.epikv.score(g, other[:, 0], policy=policy, window=5, occupied=occupied)
    assert_inside(actual, found, what=f"score by {policy}")


@pytest.mark.property("accuracy")
@given(
    shape=st.sampled_from(((1, 1, 1), (2, 5, 16), (1, 3, 100), (2, 1, 257), (7, 24), (40,))),
    dtype=st.sampled_from(strategies.DTYPES), seed=st.integers(0, 2**31 - 1), equal=st.booleans(),
)
@few
def test_changes_of_hidden_states(shape, dtype, seed, equal, twins, device):
    generator = torch.Generator(device).manual_seed(seed)
    hidden, previous = torch.randn(2, *shape, generator=generator, device=device).to(dtype)
    if equal:
        previous = previous.clone()
        previous.view(-1, shape[-1])[0] = hidden.reshape(-1, shape[-1])[0]
    truth = twins.reference.epikv.hidden_change(hidden.double(), previous.double())
    bound = judge.change_error(hidden.double(), previous.double())
    assert_within(twins.optimized.epikv.hidden_change(hidden, previous), truth, bound, what="change")
    strided = twins.optimized.epikv.hidden_change(hidden.repeat_interleave(2, -1)[..., ::2], previous)
    assert_within(strided, truth, bound, what="change of strided states")


@pytest.mark.property("accuracy")
@example(
    heads=2, head_dim=16, tokens=9, chunk=3, dtype=torch.float32, content="ordinary", padding=True, seed=1,
)
# Chunks of several tiles.
@example(
    heads=3, head_dim=16, tokens=40, chunk=13, dtype=torch.float32, content="ordinary", padding=True, seed=3
)
@given(
    heads=st.integers(1, 3), head_dim=st.sampled_from((16, 24, 80)), tokens=st.integers(1, 12),
    chunk=st.sampled_from((3, 1, 4, 64)), dtype=st.sampled_from(strategies.DTYPES),
    content=st.sampled_from(("ordinary", "equal channels", "a constant channel", "all equal", "small range")),
    padding=st.booleans(), seed=st.integers(0, 2**31 - 1),
)
@few
def test_variances_and_lags(heads, head_dim, tokens, chunk, dtype, content, padding, seed, twins, device):
    generator = torch.Generator(device).manual_seed(seed)
    key, value = torch.randn(2, 2, heads, tokens, head_dim, generator=generator, device=device)
    if content == "equal channels":
        key = key[..., :1].expand_as(key)
    elif content == "a constant channel":
        key, value = key.clone(), value.clone()
        key[..., 1], value[..., 3:] = 3.5, -2.0
    elif content == "all equal":
        key = key[:, :, :1].expand_as(key)
    elif content == "small range":
        key = 100 + key * 1e-4
    key, value = key.to(dtype), value.to(dtype)
    found = judge.variance_of(key.double())
    assert_within(
        twins.optimized.epikv.kv_variance(key), found.exact[:, 0], found.error[:, 0], what="variance"
    )
    occupied = torch.ones(2, tokens, dtype=torch.bool, device=device)
    if padding:
        occupied[0, :tokens // 2] = False
        key, value = (x.masked_fill(~occupied[:, None, :, None], torch.nan) for x in (key, value))
    clean = [x.double().masked_fill(~occupied[:, None, :, None], 0) for x in (key, value)]
    for spread in SPREADS:
        interval = judge.lag_interval(*clean, occupied, chunk, spread)
        how = {"chunk": chunk, "spread": spread}
        actual = twins.optimized.epikv.lag_kv(key, value, **how, occupied=occupied if padding else None)
        assert_inside(actual, interval, what=f"lag, {spread}")
        assert_inside(twins.reference.epikv.lag_kv(*clean, **how, occupied=occupied), interval, what="the oracle")
        assert bool((actual[interval.low == torch.inf] == torch.inf).all())


@pytest.mark.parametrize("huge", [2**40, 2**63 - 1])
@pytest.mark.parametrize("padding", [False, True])
def test_windows_and_chunks_longer_than_the_sequence(huge, padding, side, device):
    """They cost what one as long as the sequence costs. A z-score's limit for constant series grows with the window, so
    a huge window makes every series constant."""
    g = torch.randn(2, 1, 7, generator=torch.Generator().manual_seed(3)).to(device)
    occupied = torch.ones(2, 7, dtype=torch.bool, device=device)
    occupied[0, :2] = not padding
    key = g[..., None].expand(-1, -1, -1, 16).cumsum(-1)
    expected = side.rolling_mean(g, 4096, occupied=occupied)
    assert_same(side.rolling_mean(g, huge, occupied=occupied), expected, what="mean")
    assert bool((side.rolling_zscore(g, 4096, occupied=occupied) != 0).any())
    assert not bool(side.rolling_zscore(g, huge, occupied=occupied).any())
    expected = torch.where(occupied, torch.inf, 0.0)
    assert_same(side.lag_kv(key, key, chunk=huge, occupied=occupied), expected, what="lag")


# Exact properties ----------------------------------------------------------------------------------------------------


@pytest.mark.claim("EK-7a")
@pytest.mark.kind("laws")
@given(case=series(), window=st.sampled_from((4, 2, 64)), cut=st.integers(1, 19))
@few
def test_a_suffix_changes_no_bit_of_a_prefix(case, window, cut, side, twins):
    """Scores are causal: those from hidden states, from variances, and from lags."""
    g = 1 + case.make()[0].nan_to_num()
    if side is twins.reference.epikv:
        g = g.cpu()                                                     # on a GPU, the order of sums depends on shapes
    cut = min(cut, case.tokens)
    key = torch.stack((g, g.square(), g + 3), 1)[..., None].expand(-1, -1, -1, -1, 16)[:, :, 0].cumsum(-1)
    for score in (
        lambda end: side.rolling_mean(g[..., :end], window), lambda end: side.rolling_zscore(g[..., :end], window),
        lambda end: side.score(g[..., :end], g[:, :1, :end].square(), window=window),
        lambda end: side.kv_variance(key[:, :, :end].contiguous()),
        lambda end: side.lag_kv(key[:, :, :end].contiguous(), key[:, :, :end] * 2, chunk=window),
    ):
        whole, prefix = score(case.tokens), score(cut)
        assert torch.equal(whole[..., :cut], prefix), f"{whole}\n{prefix}"


@pytest.mark.property("extreme_numbers")
@pytest.mark.claim("EK-9b")
@pytest.mark.kind("laws")
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6, 3e-7, 7e18])
@pytest.mark.parametrize("window", [1, 3, 64])
def test_a_window_of_equal_values_has_no_deviation(value, window, side, device):
    """The score is exactly 0, not the rounding error of the mean."""
    g = torch.full((2, 70), value, device=device)
    assert torch.equal(side.rolling_zscore(g, window), torch.zeros_like(g))
    g[:, 1::2] *= 1 + 2.0**-23                                                          # one ulp does not count either
    assert window == 1 or torch.equal(side.rolling_zscore(g, 64), torch.zeros_like(g))


@pytest.mark.property("accuracy")
@pytest.mark.kind("laws")
def test_the_first_two_z_scores(side, device):
    """The first z-score is 0, and the second is one standard deviation from the mean, whatever the values."""
    g = torch.tensor([[5.0, 9.0, 9.5], [2.0, -7.0, 0.0]], device=device)
    z = side.rolling_zscore(g, 64)
    assert torch.equal(z[:, 0], torch.zeros(2, device=device))
    error = judge.rolled_interval(values_of(g[:, None], None), 64, zscore=True)
    assert_inside(z, Interval(error.low[:, 0], error.high[:, 0]), what="z")
    assert [round(float(x)) for x in z[:, 1]] == [1, -1]
    assert torch.equal(side.rolling_mean(g, 64)[:, 0], g[:, 0])


@pytest.mark.kind("laws")
@given(case=series(), power=st.sampled_from((1, -3, 20)))
@few
def test_z_scores_do_not_change_under_powers_of_two(case, power, side):
    g = case.make()[0].nan_to_num()
    if case.kind in ("large", "tiny"):
        return
    assert torch.equal(side.rolling_zscore(g, 7), side.rolling_zscore(g * 2.0**power, 7))


@pytest.mark.kind("laws")
@given(seed=st.integers(0, 2**31 - 1), window=st.integers(2, 64), spike=st.floats(1.0, 1e6))
@few
def test_no_z_score_exceeds_the_root_of_the_others(seed, window, spike, side, device):
    """|z| <= sqrt(w - 1), with a relative error of 2^-18 in float32. A single spike attains the bound."""
    g = torch.rand(1, 70, generator=torch.Generator(device).manual_seed(seed), device=device).round()
    g[0, 65] = 1 + spike
    most = math.sqrt(window - 1)
    assert float(side.rolling_zscore(g, window).abs().max()) <= most * (1 + 2.0**-18)
    lone = torch.zeros(1, 70, device=device, dtype=torch.float32)
    lone[0, 65] = spike
    assert abs(float(side.rolling_zscore(lone, window)[0, 65]) - most) <= most * 2.0**-18


# Selection -----------------------------------------------------------------------------------------------------------


def chosen(scores: list[float], budget: int, prompt: int, recent: int, real: list[bool]) -> list[int]:
    """`select` in plain Python."""
    total = len(scores)
    tokens = [t for t in range(total) if real[t]]
    safe = [t for t in tokens if t < prompt or t >= total - recent]
    others = [t for t in tokens if t not in safe]

    def value(t: int) -> float:
        return -math.inf if math.isnan(scores[t]) else scores[t]

    others.sort(key=lambda t: (value(t), t), reverse=True)
    return sorted(safe + others[:min(total, budget) - len(safe)])


@pytest.mark.property("decisions")
@given(data=st.data())
@few
def test_selection(data, side, device):
    """Integer scores, which make ties, NaN, infinities, -0, and padding."""
    total = data.draw(st.integers(1, 14))
    scores = data.draw(st.lists(
        st.integers(0, 3).map(float) | st.sampled_from((math.nan, -math.inf, math.inf, -0.0)), min_size=total,
        max_size=total,
    ))
    real = data.draw(st.lists(st.booleans(), min_size=total, max_size=total)) if data.draw(st.booleans()) else None
    budget = data.draw(st.integers(0, 15))
    prompt = data.draw(st.integers(0, min(total, budget)))
    recent = data.draw(st.integers(0, budget - prompt))
    occupied = None if real is None else torch.tensor([real], device=device)
    kept = side.select(
        torch.tensor([scores], device=device), budget, prompt=prompt, recent=recent, occupied=occupied
    )
    right = chosen(scores, budget, prompt, recent, real or [True] * total)
    assert kept.dtype == torch.int64
    assert kept.tolist() == [right + [-1] * (min(total, budget) - len(right))]


# Streaming -----------------------------------------------------------------------------------------------------------


def made(side: Any, config: EpiKVConfig, device: torch.device, **options: Any) -> Any:
    return side.EpiKVState(
        config, batch=2, query_heads=1, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device, **options
    )


def tokens(seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    one, two, three = torch.randn(3, 2, 1, 16, generator=torch.Generator(device).manual_seed(seed), device=device)
    return one, two, three


@pytest.mark.property("state")
@pytest.mark.claim("EK-8a")
@example(seed=1, budget=4, recent=3)
@given(seed=st.integers(0, 2**31 - 1), budget=st.integers(1, 9), recent=st.none() | st.integers(1, 3))
@settings(max_examples=max(at_least(3), settings().max_examples // 10))
def test_streaming_keeps_what_select_keeps_of_the_whole(seed, budget, recent, side, device):
    """A window of 1 and hidden states that change by integers make scores integers, so no choice is adjudicated."""
    recent = None if recent is None else min(recent, budget)
    config = EpiKVConfig(
        budget, policy="hs_variance", window=1, recent=recent, keep_prompt=False, hidden_size=1
    )
    moves = torch.randint(0, 4, (2, 2, 12), generator=torch.Generator(device).manual_seed(seed), device=device)
    hidden = moves.cumsum(-1).float()[..., None]                                        # [2, B, T, 1]
    scores = (moves[0] - moves[1]).float()
    scores[:, 0] = 0
    state = made(side, config, device)
    for t in range(12):
        state.step(*tokens(t, device), hidden[0, :, t], hidden[1, :, t])
        kept = side.select(scores[:, :t + 1], budget, prompt=0, recent=config.newest)
        held = state.positions.where(state.occupied, 99).sort(1).values[:, :kept.shape[1]]
        assert_same(held, kept, what=f"tokens held after token {t}")
        frozen = scores.gather(1, state.positions.clamp_min(0)).masked_fill(~state.occupied, -torch.inf)
        assert_same(state.score, frozen, what="scores")


def test_a_scorer_alone_notices_an_interrupted_prompt(twins, device, monkeypatch):
    from kvtwin.optimized.epikv import scorer as ours

    scorer = twins.optimized.epikv.EpiKVScorer(
        EpiKVConfig(budget=4, policy="kv_key", keep_prompt=False), batch=1, hidden_size=16, key_value_heads=1,
        head_dim=16, dtype=torch.float32, device=device,
    )
    key, occupied = torch.ones(1, 1, 3, 16, device=device), torch.ones(1, 3, dtype=torch.bool, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(ours, "select", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scorer.prefill(occupied, None, key, key)
    with pytest.raises(RuntimeError, match="interrupted prefill"):
        scorer.step(key=key[:, :, 0], value=key[:, :, 0])


def test_layers_that_share_a_scorer_decide_like_separate_layers(side, device):
    """Two layers with the same hidden states, each with its own scorer or both with a shared one."""
    config = EpiKVConfig(5, window=3, hidden_size=16)
    sizes = {"batch": 2, "hidden_size": 16, "key_value_heads": 1, "head_dim": 16, "dtype": torch.float32}
    scorer = side.EpiKVScorer(config, **sizes, device=device)
    alone, shared = [made(side, config, device) for _ in range(2)], [
        made(side, config, device, scorer=scorer) for _ in range(2)
    ]
    occupied = torch.tensor([[True] * 3, [False, True, True]], device=device)
    prompt = [[torch.stack([tokens(20 * n + t, device)[k] for t in range(3)], 2) for k in range(3)] for n in range(2)]
    hidden = torch.randn(2, 2, 12, 16, generator=torch.Generator(device).manual_seed(5), device=device)
    scorer.check_prompt(occupied)
    scorer.admit(occupied, None)
    for number in range(2):
        scorer.observe(number, hidden[number, :, :3], occupied)
        one = alone[number].prefill(*prompt[number], occupied, hidden[0, :, :3], hidden[1, :, :3])
        assert torch.equal(shared[number].prefill(*prompt[number], occupied), one)
    for t in range(3, 12):
        for number in range(2):
            given = tokens(100 * number + t, device)
            one = alone[number].step(*given, hidden[0, :, t], hidden[1, :, t])
            assert torch.equal(shared[number].step(*given), one)
        scorer.step((hidden[0, :, t][:, None], hidden[1, :, t][:, None]))
        for state in shared:
            assert torch.equal(state.positions, alone[0].positions)
            assert torch.equal(state.score, alone[0].score)
            assert torch.equal(state.next_slot, alone[0].next_slot)
    with pytest.raises(ValueError, match="must be left out: the shared scorer"):
        shared[0].step(*tokens(1, device), hidden[0, :, 0], hidden[1, :, 0])
    shared[0].reset()
    assert scorer.tokens_seen == 12


@pytest.mark.property("state")
def test_a_kept_prompt_outlasts_equal_scores(side, device):
    """All tokens of a first chunk score +inf, as a kept prompt does. The prompt tokens, which are the oldest, must not
    be evicted."""
    state = made(side, EpiKVConfig(6, policy="lag_kv"), device)
    given = [tokens(t, device) for t in range(9)]
    state.prefill(*(torch.stack([token[part] for token in given[:3]], 2) for part in range(3)))
    for token in given[3:]:
        state.step(*token)
    assert_same(state.positions.sort(1).values, torch.tensor([[0, 1, 2, 6, 7, 8]] * 2, device=device), what="held")
