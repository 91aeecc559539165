"""Tests of EpiKV's checker: its bounds are sound and tight, and it detects wrong results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.checkers import epikv, epikv_hybrids
from kvtwin.conformance.judge.checkers import epikv_scores as judge
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.reference import epikv as reference
from kvtwin.reference.attention import attention_weights, logits
from kvtwin.reference.epikv.hybrids import relative_entropy


def in_any_order(x: Tensor, order: Tensor) -> Tensor:
    """The sequential float32 sum over the last dimension, in this order."""
    total = torch.zeros_like(x[..., 0])
    for place in order.tolist():
        total = total + x[..., place]
    return total


def zscore32(x: Tensor, order: Tensor) -> Tensor:
    """A straightforward z-score in float32: x [N, n]."""
    centre = in_any_order(x, order) / x.shape[-1]
    deviation = x - centre[:, None]
    sigma = (in_any_order(deviation.square(), order.flip(0)) / x.shape[-1]).sqrt()
    flat = sigma <= 4 * 2.0**-24 * x.shape[-1] * x.abs().amax(-1)
    return (deviation[:, -1] / sigma.where(~flat, 1)).masked_fill(flat, 0)


@pytest.mark.parametrize(
    ("scale", "spread"), [(1.0, 1.0), (10.0, 1e-3), (3.0, 1e-5), (1e6, 1e-6), (1.0, 2e-7)], ids=str
)
@pytest.mark.parametrize("window", [2, 8, 16])
def test_bounds_of_z_scores_hold_and_are_not_loose(scale, spread, window):
    """With adversarial orders of summation, ordinary data uses at least 1 % of the bound."""
    generator = torch.Generator().manual_seed(window)
    x = scale * (1 + spread * torch.rand(400, window, generator=generator))
    there = torch.ones_like(x, dtype=torch.bool)
    interval = judge.zscore_interval(x.double(), torch.zeros_like(x).double(), there, window)
    truth = judge.zscore_interval(x.double(), torch.zeros_like(x).double(), there, window)
    exact = reference.rolling_zscore(x.double(), window)[:, -1]
    epikv.assert_inside(exact, truth, what="the oracle")
    orders = [torch.arange(window), torch.arange(window).flip(0), torch.randperm(window, generator=generator)]
    used = 0.0
    for order in orders:
        actual = zscore32(x, order).double()
        epikv.assert_inside(actual, interval, what="z")
        width = torch.maximum(interval.high - exact, exact - interval.low).clamp_min(1e-300)
        used = max(used, float(((actual - exact).abs() / width).max()))
    assert used > 0.01 or spread < 1e-5, f"only {used} of the bound is used"


@pytest.mark.parametrize("size", [1, 16, 300])
def test_bounds_of_changes_hold_and_are_not_loose(size):
    generator = torch.Generator().manual_seed(size)
    hidden, previous = torch.randn(2, 300, size, generator=generator)
    truth = (hidden.double() - previous.double()).square().sum(-1).sqrt()
    bound = judge.change_error(hidden.double(), previous.double())
    actual = in_any_order((hidden - previous).square(), torch.arange(size)).sqrt().double()
    used = float(((actual - truth).abs() / bound).max())
    assert 0.01 < used <= 1 or size == 1
    assert float(judge.change_error(hidden.double(), hidden.double()).max()) == 0


@pytest.mark.parametrize("shift", [0.0, 50.0])
def test_bounds_of_variances_and_spreads_hold_and_are_not_loose(shift):
    generator = torch.Generator().manual_seed(3)
    x = shift + torch.randn(2, 3, 20, 16, generator=generator)
    order = torch.randperm(16, generator=generator)
    centre = in_any_order(x, order) / 16
    variance = (in_any_order((x - centre[..., None]).square(), order) / 16).mean(1)
    values = judge.variance_of(x.double())
    used = float(((variance.double() - values.exact[:, 0]).abs() / values.error[:, 0]).max())
    assert 0.01 < used <= 1
    low, high = x[:, :, :10].amin(2), x[:, :, :10].amax(2)
    normal = (x[:, :, 10:] - low[:, :, None]) / (high - low)[:, :, None]
    squares = in_any_order((normal - (in_any_order(normal, order) / 16)[..., None]).square(), order) / 16
    for which, spread in (("variance", squares), ("deviation", squares.sqrt())):
        interval = judge.spread_interval(x[:, :, 10:].double(), low.double(), high.double(), which)
        epikv.assert_inside(spread, interval, what=which)
        middle = (interval.low + interval.high) / 2
        assert float(((spread.double() - middle).abs() / (interval.high - middle)).max()) > 0.01


def test_a_threshold_is_open_where_rounding_decides():
    """Far above the threshold the z-score must be right, and far below it 0. At the threshold, both are accepted."""
    window, there = 4, torch.ones(1, 4, dtype=torch.bool)
    limit = 4 * 2.0**-24 * window
    for factor, low, high in ((1e3, 0.9, 1.1), (1.0, -1.0, 2.1), (1e-3, 0.0, 0.0)):
        x = 1 + factor * limit * torch.tensor([[-1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
        found = judge.zscore_interval(x, torch.zeros_like(x), there, window)
        assert low <= float(found.low)
        assert float(found.high) <= high
        assert (float(found.low) <= 0 <= float(found.high)) == (factor < 10)


def test_numbers_outside_their_interval_are_rejected():
    interval = Interval(torch.tensor([0.0, 1.0]).double(), torch.tensor([0.5, 1.0]).double())
    epikv.assert_inside(torch.tensor([0.5, 1.0]), interval, what="it")
    for wrong in ([0.6, 1.0], [0.5, 1.1], [float("nan"), 1.0], [-0.1, 1.0]):
        with pytest.raises(Mismatch, match="it: 1 of 2 elements are out of their bounds"):
            epikv.assert_inside(torch.tensor(wrong), interval, what="it")
    epikv.assert_inside(torch.tensor([9.0, 1.0]), interval, what="it", where=torch.tensor([False, True]))


def state(
    positions: list[int], scores: list[float], slot: int, thoughts: list[int] | None = None, **config: object
) -> SimpleNamespace:
    place = torch.tensor([positions])
    return SimpleNamespace(
        config=reference.EpiKVConfig(4, **config), positions=place, occupied=place >= 0,
        tokens_seen=max(positions) + 1, score=torch.tensor([scores]), next_slot=torch.tensor([slot]),
        thoughts=None if thoughts is None else torch.tensor([thoughts]),
    )


@pytest.mark.parametrize(
    ("positions", "scores", "right", "wrong", "thoughts"),
    [
        ([0, 1, 2, 3], [3.0, 1.0, 2.0, 0.0], 1, {0: "scores less", 2: "scores less", 3: "protected"}, None),
        ([2, 0, 1, 3], [1.0, 1.0, 5.0, 0.0], 1, {0: "ties go to the lowest index", 2: "scores less"}, None),
        ([0, -1, -1, 1], [0.0, -torch.inf, -torch.inf, 0.0], 1, {2: "lowest free slot", 0: "lowest free slot"}, None),
        # The transition token is the newest, so it is protected. Of the execution tokens, slot 2 scores less than slot
        # 0.
        ([0, 1, 2, 3], [3.0, 1.0, 2.0, 0.0], 2, {0: "scores less", 1: "protected", 3: "protected"}, [1, 2, 1, 0]),
    ],
)
def test_wrong_choices_are_found(positions, scores, right, wrong, thoughts):
    """The newest token is protected. The least important thought type is evicted first, then the lowest score, then the
    oldest token, whatever its slot."""
    for slot, says in {right: None, **wrong}.items():
        adapter = epikv.Adapter()
        seen = max(positions) + 1
        exact = torch.zeros(1, seen, dtype=torch.float64)
        for position, value in zip(positions, scores, strict=True):
            if position >= 0:
                exact[0, position] = value
        adapter.low = adapter.high = exact
        adapter.prompt = torch.zeros(1, 0, dtype=torch.bool)
        # The newest two are protected: the next token and the one before it.
        tested = state(positions, scores, slot, thoughts, recent=2, keep_prompt=False)
        truth = state(positions, scores, right, thoughts, recent=2, keep_prompt=False)
        if says is None:
            adapter._choice(tested, truth, "now")
        else:
            with pytest.raises(Mismatch, match=says):
                adapter._choice(tested, truth, "now")


def test_bounds_of_sums_of_weights_hold_and_are_not_loose():
    """30 steps over 8 slots, in straightforward float32."""
    generator = torch.Generator().manual_seed(5)
    positions, occupied = torch.arange(8)[None], torch.ones(1, 8, dtype=torch.bool)
    sums, computed = epikv_hybrids.Sums(), torch.zeros(1, 8)
    sums.arrive(occupied)
    key = torch.randn(1, 2, 8, 16, generator=generator)
    for _ in range(30):
        query = torch.randn(1, 4, 16, generator=generator)
        sums.step(DecodeCase.of(query, key, key, occupied).attention, positions)
        weight = ((query[:, :, None] * key.repeat_interleave(2, 1)).sum(-1) / 4).softmax(-1)
        computed = computed + weight.mean(1)
    assert abs(float(sums.exact.sum()) - 30) < 1e-12                       # each step adds 1, within float64's error
    own = torch.zeros(1, 8, dtype=torch.float64)
    found = sums.added(Interval(own, own))
    epikv.assert_inside(computed, found, what="sums")
    assert float(((computed - sums.exact).abs() / (found.high - sums.exact)).max()) > 0.01
    lost = computed - 2.0**-12
    with pytest.raises(Mismatch, match="8 of 8 elements are out of their bounds"):
        epikv.assert_inside(lost, found, what="sums")
    kept = sums.added(Interval(own + torch.inf, own + torch.inf))
    assert bool((kept.low == torch.inf).all()), "the score of a kept prompt must stay infinite"


@pytest.mark.parametrize("size", [0, 1, 5, 40])
def test_the_bound_of_an_entropy_holds_and_is_not_loose(size):
    """In straightforward float32, from weights and from logits. Of all cases of a size, the largest error reaches 0.2 %
    of the bound, except for logits in the hundreds, where the bound allows for cancellation in the dot product. Most of
    the bound is for `exp` and `log` on a GPU, which torch computes more exactly here."""
    generator, used = torch.Generator().manual_seed(9), []
    for tokens in (2, 3, 8, 16):
        query, key = (torch.randn(40, heads, count, 16, generator=generator) * size**0.5
                      for heads, count in ((4, 1), (2, tokens)))
        occupied = torch.ones(40, tokens, dtype=torch.bool)
        exact = attend(query[:, :, 0], key, key, occupied)
        found, truth = epikv_hybrids.entropy_interval(exact), relative_entropy(exact.weight[:, :, 0], occupied)
        weight = attention_weights(query[:, :, 0], key, occupied, scale=0.25)
        logit = logits(query[:, :, 0], key, occupied, scale=0.25)
        below = logit.amax(-1, keepdim=True) - logit
        total = (-below).exp().sum(-1)
        by_logits = (total.log() + ((-below).exp() * below).sum(-1) / total).mean(1) / torch.tensor(tokens).log()
        for computed in (truth, relative_entropy(weight, occupied), by_logits):
            epikv.assert_inside(computed, found, what="entropy")
            used.append(float(((computed.double() - truth).abs() / (found.high - truth)).max()))
        with pytest.raises(Mismatch, match="40 of 40 elements are out of their bounds"):
            epikv.assert_inside(truth + 2.0**-9, found, what="entropy")
    assert max(used) > (0.002 if size < 40 else 0.0002)


def test_a_token_alone_has_no_entropy():
    key = torch.ones(1, 1, 3, 16)
    exact = attend(key[:, :, 0], key, key, torch.tensor([[False, True, False]]))
    assert [end.tolist() for end in epikv_hybrids.entropy_interval(exact)] == [[0], [0]]


def test_a_wrong_thought_is_found():
    """One of two tokens is below the threshold. This is between the edges, so reasoning. At an edge, both sides are
    right."""
    key = 100 * torch.eye(16)[None, None, :2]
    case = DecodeCase.of(key[:, :, 0], key, key, torch.ones(1, 2, dtype=torch.bool), scale=1.0)

    def told(thought: int, edges: tuple[float, float]) -> None:
        config = reference.EpiKVConfig(4, policy="segment_hs", edges=edges, tau=1)
        truth = torch.tensor([2])
        attention = SimpleNamespace(_decoded=1, thought=truth, thoughts=torch.tensor([[1, 2]]))
        oracle = SimpleNamespace(
            config=config, scorer=SimpleNamespace(attention=attention), positions=torch.tensor([[0, 1]]), tokens_seen=2,
            scale=1.0,
        )
        epikv_hybrids.assert_thoughts_right(
            SimpleNamespace(thoughts=torch.tensor([[1, thought]])), oracle, case, "now"
        )
        assert int(attention.thought) == thought, "the reference must adopt it"

    told(2, (0.3, 0.6))
    for wrong in (0, 1, 5, -1):
        with pytest.raises(Mismatch, match=r"thought now: row 0.*expected one of \[2\]"):
            told(wrong, (0.3, 0.6))
    for right in (2, 1):
        told(right, (0.5, 0.6))
    told(0, (0.3, 0.4))


def test_a_wrong_thought_by_entropy_is_found():
    """Two equal tokens have an entropy of 1, which is execution above both edges, reasoning between them, and
    transition below them. At an edge, both sides are right."""
    key = torch.ones(1, 1, 2, 16)
    case = DecodeCase.of(key[:, :, 0], key, key, torch.ones(1, 2, dtype=torch.bool), scale=1.0)

    def told(thought: int, edges: tuple[float, float]) -> None:
        config = reference.EpiKVConfig(4, policy="segment_hs", segments_by="entropy", edges=edges, tau=1)
        attention = SimpleNamespace(_decoded=1, thought=torch.tensor([2]), thoughts=torch.tensor([[1, 2]]))
        oracle = SimpleNamespace(
            config=config, scorer=SimpleNamespace(attention=attention), positions=torch.tensor([[0, 1]]), tokens_seen=2,
            scale=1.0,
        )
        tested = SimpleNamespace(thoughts=torch.tensor([[1, thought]]))
        epikv_hybrids.assert_thoughts_right(tested, oracle, case, "now")
        assert int(attention.thought) == thought, "the reference must adopt it"

    for edges, right in (((0.3, 0.6), 1), ((0.3, 1.1), 2), ((1.1, 1.2), 0)):
        told(right, edges)
        for wrong in {0, 1, 2, 5, -1} - {right}:
            with pytest.raises(Mismatch, match=rf"thought now: row 0, of entropy.*expected one of \[{right}\]"):
                told(wrong, edges)
    for right in (1, 2):
        told(right, (0.3, 1.0))
    for right in (2, 0):
        told(right, (1.0, 1.1))
