"""The judge of RaaS with pages: bounds of pages are sound and not loose, and wrong pages are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvtwin.conformance import stats
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import raas
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.judge.mismatch import JudgeError
from kvtwin.reference.attention import INF
from kvtwin.reference.baselines import raas as reference
from kvtwin.reference.blocks import group_mean
from kvtwin.reference.selection import top_k


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


# Bounds --------------------------------------------------------------------------------------------------------------


def bound_of(query, low, high, order):
    """The mean bound of a group [B, Hkv, pages] in float32, with sums over heads and channels in this order."""
    heads = low.shape[1]
    ask = query.unflatten(1, (heads, -1))[:, :, :, None]
    product = torch.maximum(ask * low[:, :, None], ask * high[:, :, None]).transpose(2, 3).flatten(3)
    total = torch.zeros(product.shape[:-1])
    for index in order:
        total = total + product[..., index]
    return total / ask.shape[2]


@pytest.mark.parametrize(("head_dim", "group", "least"), [(16, 1, 0.05), (16, 4, 0.03), (128, 2, 0.02)])
def test_no_correct_arithmetic_exceeds_the_bound_of_a_page(head_dim, group, least):
    generator = torch.Generator().manual_seed(head_dim)
    highest = 0.0
    for content in ("ordinary", "positive", "powers"):
        query, key = torch.randn(1, group, head_dim, generator=generator), torch.randn(
            1, 1, 9, 4, head_dim, generator=generator
        )
        if content == "positive":
            query, key = query.abs(), key.abs()
        if content == "powers":
            key = key * 2.0 ** torch.randint(-20, 20, (head_dim,), generator=generator)
        low, high = key.amin(3), key.amax(3)
        allowed = raas.bound_interval(query.double(), low.double(), high.double())
        middle = (allowed.low + allowed.high) / 2
        for _ in range(8):
            found = bound_of(query, low, high, torch.randperm(group * head_dim, generator=generator)).double()
            assert bool((found >= allowed.low).all()) and bool((found <= allowed.high).all())
            highest = max(highest, float(((found - middle).abs() / (allowed.high - middle)).max()))
    assert highest > least


def test_the_bound_of_a_query_of_zeros_is_exact():
    query, ends = torch.zeros(1, 2, 16), torch.ones(1, 1, 3, 16)
    allowed = raas.bound_interval(query.double(), -ends.double(), ends.double())
    assert bool((allowed.low == 0).all()) and bool((allowed.high == 0).all())


# Wrong states --------------------------------------------------------------------------------------------------------


class NewestOfNear(reference.RaaSState):
    """Of bounds that differ by rounding only, the newest page is renewed. Right, unless they are equal."""

    near = 1e-6

    def _renewed(self, query, low, high, before):
        bound = group_mean(reference.page_bound(query, low, high), self.sizes.key_value_heads)
        bound = ((bound / self.near).round() * self.near).masked_fill(~before, -INF).flip(-1)
        best = bound.shape[-1] - 1 - top_k(bound, self.config.page_budget // 2)
        return before & torch.zeros_like(before).scatter(-1, best, True)


class LeavesInPart(reference.RaaSState):
    """One token of the page that is evicted first stays, and one of the next page leaves."""

    def _keep_mask(self, rank, protected):
        keep = super()._keep_mask(rank, protected)
        if not bool(self._due().any()):
            return keep
        gone = self.occupied & ~keep
        back = torch.zeros_like(keep).scatter(-1, gone.to(torch.int8).argmax(-1, keepdim=True), True)
        may = keep & ~protected
        out = torch.zeros_like(keep).scatter(-1, may.to(torch.int8).argmax(-1, keepdim=True), True)
        return (keep | back) & ~out


class IncompleteLeaves(reference.RaaSState):
    """The tokens of the incomplete page leave as well."""

    def _keep_mask(self, rank, protected):
        size = self.config.page_size
        incomplete = self._index // size == (self._valid_seen // size)[:, None, None]
        return super()._keep_mask(rank, protected) & ~incomplete


class TimesOfTokens(reference.RaaSState):
    """The tokens of a page have timestamps of their own, below that of the page."""

    def _rank(self):
        found = super()._rank()
        self.score.sub_((self.positions == 0).to(self.score.dtype))
        return found


class AlwaysTheNewest(reference.RaaSState):
    """The newest pages are renewed, whatever their bounds."""

    def _renewed(self, query, low, high, before):
        return super()._renewed(torch.zeros_like(query), low.flip(2), high.flip(2), before)


class OneMore(reference.RaaSState):
    """A query renews the pages of a larger budget."""

    def _renewed(self, query, low, high, before):
        bound = group_mean(reference.page_bound(query, low, high), self.sizes.key_value_heads)
        best = top_k(bound.masked_fill(~before, -INF), self.config.page_budget // 2 + 1)
        return before & torch.zeros_like(before).scatter(-1, best, True)


def run(state, content="ordinary", seed=2, **options):
    config = {"budget": 8, "page_size": 2, "interval": 2, "block_size": 6, "alpha": None, **options}
    trace = StateTrace(
        method="raas", config=tuple(config.items()), batch=2, key_value_heads=1, group=1, prompt=13, steps=5, seed=seed,
        content=content, padding="random", device="cpu",
    )
    return lockstep.run(trace, SimpleNamespace(RaaSState=state, RaaSConfig=reference.RaaSConfig))


def test_the_reference_in_float32_is_right():
    for content in ("ordinary", "near_ties", "equal_keys", "zero_query"):
        summary = run(reference.RaaSState, content)
        assert summary.decisive and not summary.adjudicated


@pytest.mark.parametrize(("state", "message"), [
    (LeavesInPart, "a page is evicted in part"),
    (IncompleteLeaves, "the incomplete page must be kept"),
    (TimesOfTokens, "score"),
    (AlwaysTheNewest, "tokens kept|score"),
    (OneMore, "tokens kept|score"),
])
def test_wrong_pages_are_found(state, message):
    with pytest.raises(Mismatch, match=message):
        run(state)


def test_equal_bounds_are_decided_by_age():
    with pytest.raises(Mismatch, match="score|tokens kept"):
        run(NewestOfNear, "equal_keys")


@pytest.mark.parametrize("options", [{}, {"page_size": None, "alpha": 0.1, "interval": 1}], ids=["pages", "tokens"])
def test_a_wrong_time_of_the_reference_is_an_error_of_the_judge(options, monkeypatch):
    """The reference's own bounds and weights allow no renewal that it makes."""
    observe = reference.RaaSState._observe

    def renews_all(self, chunk):
        observe(self, chunk)
        self.score.masked_fill_(self.occupied, float(self.tokens_seen - 1))

    monkeypatch.setattr(reference.RaaSState, "_observe", renews_all)
    with pytest.raises(JudgeError, match="the reference has time"):
        run(reference.RaaSState, **options)


@pytest.mark.parametrize("shift", [-20, 20])
def test_a_time_outside_of_the_run_is_found_whatever_the_bounds(shift, monkeypatch):
    bound = raas.Adapter.score_error
    monkeypatch.setattr(raas.Adapter, "score_error", lambda self, chunk: bound(self, chunk) + 100)

    class Shifted(reference.RaaSState):
        def _rank(self):
            found = super()._rank()
            self.score.add_(shift)
            return found

    with pytest.raises(Mismatch, match="timestamps must be from the token's position to the newest one"):
        run(Shifted)


def near_keys(count):
    """Tokens whose keys differ by less than rounding: in a channel that is 2^-23 of the others."""
    key = torch.ones(1, 1, count, 16)
    key[..., 3] = 2.0**-22 * torch.arange(count)
    return torch.ones_like(key), key, key


def test_near_bounds_leave_the_timestamp_open():
    """Either page may be renewed, and the reference adopts what the other state keeps."""
    config = {"budget": 4, "page_size": 2, "interval": 2, "block_size": 12, "alpha": None}
    both = lockstep.pair(
        "raas", SimpleNamespace(RaaSState=NewestOfNear), config=config, batch=1, query_heads=1, key_value_heads=1,
        head_dim=16, dtype=torch.float32, device="cpu",
    )
    query, key, value = near_keys(6)
    # The older page has the lower bound by less than an ulp of the sum.
    key[..., :2, 3], key[..., 2:4, 3] = 2.0**-23, 0
    query[..., :4, :] = 0
    with stats.collect():                                               # few decisions are decisive
        both.prefill(query, key, value)
    assert both.summary.adjudicated == 1
    assert both.tested.positions.tolist() == both.reference.positions.tolist()
    assert sorted(both.tested.positions[0, 0, :4].tolist()) == [2, 3, 4, 5]
