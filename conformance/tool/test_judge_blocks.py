"""Tests of the judge: lockstep of block states accepts a right state and detects each kind of fault.

The states under test are the reference's in float32 or 16 bits, unchanged or with one fault: a class that is derived
from it and from the class of the fault. Methods that are not there have no faults.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kvtwin.conformance import discovery, stats
from kvtwin.conformance.cases.block_cases import with_spiked_values
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.compare import JudgeError, Mismatch
from kvtwin.conformance.judge.compare_by_age import assert_kept_by_age_right

MODULES = {pair.name: pair.reference for pair in discovery.methods() if pair.is_baseline and pair.takes_blocks}
OPTIONS = {"streaming_llm": {"sinks": 2}, "snapkv": {"window": 3, "kernel_size": 3}}


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


def trace(method: str, **options) -> StateTrace:
    config = {**checkers.ask(method, "SMALL", {}), "budget": 6, "block_size": 4, **OPTIONS.get(method, {})}
    config |= options.pop("config", {})
    sizes = {"batch": 2, "key_value_heads": 2, "group": 2, "prompt": 15, "steps": 6, "seed": 3, **options}
    return StateTrace(method=method, config=tuple(config.items()), **sizes)


def faulty(method: str, fault: type) -> SimpleNamespace:
    """A stand-in for the module under test: the reference's, with a faulty state."""
    config, state = checkers.pair(method).config, checkers.pair(method).state
    return SimpleNamespace(**{config.__name__: config, state.__name__: type(fault.__name__, (fault, state), {})})


def least(method: str) -> dict[str, int]:
    """The smallest budget that the config accepts, without sinks if it must be."""
    for options in ({"budget": 1}, {"budget": 1, "sinks": 0}):
        with contextlib.suppress(TypeError, ValueError):
            checkers.pair(method).config(**dict(trace(method).config) | options)
            return options
    return {"budget": 2}


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("options", [
    {}, {"padding": "random", "dtype": torch.bfloat16, "seed": 2}, None,
    {"prompt": 0, "steps": 14, "dtype": torch.float16}, {"config": {"block_size": 20}},
], ids=["prompt", "padded", "least_budget", "steps", "one_block"])
def test_a_right_state_passes(name, options):
    with stats.collect() as seen:
        summary = lockstep.run(trace(name, **({"config": least(name)} if options is None else options)), MODULES[name])
    assert 0 < seen.bound_utilisation <= 1
    if options is not None:
        assert seen.total >= seen.decisive > 20
        assert summary.decisive >= 5, "the trace must be long enough to be meaningful"


class SumsStayBehind:
    """The sums stay in their slots when tokens move."""

    _per_slot = ("key", "value", "occupied", "positions")


class ForgetsSums:
    """Only the weights of the last block count."""

    def _observe(self, chunk):
        self.score.clamp_max_(0)
        super()._observe(chunk)


class SumsOverHeads:
    """Weights are summed, not averaged: the choices are equal, but not the scores."""

    def _observe(self, chunk):
        before = self.score.clone()
        super()._observe(chunk)
        self.score.add_((self.score - before).nan_to_num(0))


class SumsPadding:
    """Padding in a block counts as a query that attends to the first token."""

    def _observe(self, chunk):
        super()._observe(chunk)
        self.score[..., 0] += (~chunk.valid).sum(-1, keepdim=True)


class ProtectsNothing:
    def _rank(self):
        return self.score, torch.zeros_like(self.occupied)


class ProtectsOneTooMany:
    def _rank(self):
        return self.score, self._newest(self.config.protected + 1)


class KeepsTheWorst:
    def _rank(self):
        rank, protected = super()._rank()
        return -rank, protected


class EvictsFirst:
    """The cache evicts before the block attends to it. Rows that are not full show this."""

    def _append(self, query, key, value, valid):
        self.occupied[..., 0] = False
        return super()._append(query, key, value, valid)


class EvictsEarly:
    """The cache never holds more than budget - 1 tokens."""

    def _keep_mask(self, rank, protected):
        stays = super()._keep_mask(rank, protected)
        oldest = self.positions.masked_fill(~stays, 99).argmin(-1, keepdim=True)
        return stays.scatter(-1, oldest, stays.sum(-1, keepdim=True) < self.config.budget)


class KeepsTwice:
    def _compact(self, stays):
        super()._compact(stays)
        self.positions[..., 1] = self.positions[..., 0]


class MovesInAnotherOrder:
    """The newest kept token is put into the first free slot."""

    def _compact(self, stays):
        super()._compact(stays)
        if bool(self.occupied[..., :2].all()):
            for name in self._per_slot:
                tensor = getattr(self, name)
                tensor[:, :, :2] = tensor[:, :, :2].flip(2)


class LeavesTheBlock:
    """The block's slots are not freed."""

    def _compact(self, stays):
        super()._compact(stays)
        self.occupied[..., -1] = True


class SeesTheFuture:
    def append_block(self, query, key, value, occupied=None):
        return super().append_block(query.flip(2), key, value, occupied).flip(2)


class ForgetsTheBlock:
    """A value of the kept tokens of a block is not copied."""

    def _compact(self, stays):
        value = self.value.clone()
        super()._compact(stays)
        self.value.copy_(value)


class LowPrecision:
    """Sums are in bfloat16."""

    def _observe(self, chunk):
        super()._observe(chunk)
        self.score.copy_(self.score.bfloat16())


@pytest.mark.parametrize(("state", "says"), [
    (SumsStayBehind, "score (in the chunk|at token)"), (ForgetsSums, "score (in the chunk|at token)|is evicted"),
    (SumsOverHeads, "score in the chunk"), (SumsPadding, "score in the chunk|is evicted"),
    (ProtectsNothing, "protected slots .* are evicted"), (ProtectsOneTooMany, "is evicted with a score"),
    (KeepsTheWorst, "is evicted with a score"), (EvictsFirst, "is evicted with a score"),
    (EvictsEarly, "to be kept, got 5"), (KeepsTwice, "holds a token twice"), (MovesInAnotherOrder, "positions in the"),
    (LeavesTheBlock, "against positions"), (SeesTheFuture, "output|score|is evicted"),
    (ForgetsTheBlock, "prefill's output"), (LowPrecision, "score in the chunk"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_faulty_state_is_noticed(state, says):
    with pytest.raises(Mismatch, match=f"(?s){says}"), stats.collect():
        lockstep.run(trace("h2o", padding="random"), faulty("h2o", state))


class IgnoresValues:
    def _rank(self):
        return self.score, super()._rank()[1]


class SquaresValues:
    """||v||_2 is used instead of ||v||_1."""

    def _rank(self):
        return self.score * self.value.square().sum(-1).sqrt(), super()._rank()[1]


class LosesTheFirst:
    def _rank(self):
        return super()._rank()[0], self._newest(self.config.protected)


class FirstQuery:
    """The oldest query of the block observes."""

    def _observe(self, chunk):
        super()._observe(chunk._replace(valid=chunk.valid & (chunk.valid.cumsum(-1) == 1)))


class LinearRanks:
    """Weights that underflow have equal ranks."""

    def _rank(self):
        return self.score, super()._rank()[1]


class PadsDifferently:
    """The pool includes tokens of the window."""

    def _observe(self, chunk):
        super()._observe(chunk)
        size = self.config.kernel_size
        self.score.add_(torch.isfinite(self.score) * 1e-3 * size)


class PoolsBySlot:
    """The pool runs along slots instead of positions."""

    def _observe(self, chunk):
        positions = self.positions.clone()
        order = torch.arange(positions.shape[-1]).expand(positions.shape)
        seen, self.positions = self._seen, torch.where(self.occupied, order, -1)
        self._seen = int(positions.shape[-1])
        super()._observe(chunk._replace(positions=chunk.positions - seen + self._seen))
        self.positions, self._seen = positions, seen


class EvictsOneEarly:
    """Heads are due with one token less than budget + interval."""

    def _due(self):
        return self.occupied.sum(-1, keepdim=True) >= self.config.capacity


class ObservesAnyway:
    """Scores are recomputed for heads that are not compressed."""

    def _observe(self, chunk):
        self._due = lambda: self.occupied.any(-1, keepdim=True)
        super()._observe(chunk)
        del self._due


class LosesTheSink:
    def _rank(self):
        return self.positions, self._oldest(self.config.sinks - 1)


class AnotherSeed:
    def _observe(self, chunk):
        self.score.copy_(MODULES["random"].score(self.positions, seed=self.config.seed + 1))


FAULTS = [
    ("vatp", IgnoresValues, {}), ("vatp", SquaresValues, {}), ("vatp", LosesTheFirst, {}), ("tova", FirstQuery, {}),
    ("tova", LinearRanks, {"content": "extreme_1e4", "steps": 20}), ("snapkv", PadsDifferently, {}),
    ("snapkv", PoolsBySlot, {}), ("snapkv", EvictsOneEarly, {"config": {"interval": 3}}),
    ("snapkv", ObservesAnyway, {"config": {"interval": 3}}), ("streaming_llm", LosesTheSink, {}),
    ("random", AnotherSeed, {}),
]


@pytest.mark.parametrize(
    ("name", "state", "options"), [fault for fault in FAULTS if fault[0] in MODULES],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_faulty_method_is_noticed(name, state, options):
    made = trace(name, **options)
    with pytest.raises(Mismatch), stats.collect():
        lockstep.run(with_spiked_values(made) if name == "vatp" else made, faulty(name, state))


class PicksTheLast:
    """In near ties it keeps other tokens than float64, within the bound."""

    def _rank(self):
        rank, protected = super()._rank()
        return rank.round(decimals=5) + 1e-9 * 0 - 1e-7 * self.positions / 100, protected


def near_tie_trace(method: str, tokens: int, **config) -> StateTrace:
    """Tokens whose keys differ only by ulps of one channel."""
    key = torch.zeros(1, 1, tokens, 16)
    key[0, 0, :, 0] = 1 + torch.arange(tokens) * 2.0**-23
    made = trace(method, batch=1, key_value_heads=1, group=1, prompt=0, steps=tokens, config=config)
    made._adopt({"query": torch.ones_like(key), "key": key, "value": torch.ones_like(key)})
    return made


@pytest.mark.parametrize("name", [name for name in ("tova",) if name in MODULES])
def test_a_legal_tie_is_adopted_and_the_rest_of_the_trace_stays_comparable(name):
    """Of a method whose ranks depend on the newest query alone: sums would tell the tokens apart."""
    with stats.collect() as seen:
        summary = lockstep.run(near_tie_trace(name, 20), faulty(name, PicksTheLast))
    assert summary.adjudicated > 3 and seen.ties == summary.adjudicated and summary.steps == 20


@pytest.mark.slow
def test_blocks_reset_and_reorder_are_followed():
    for method, module in MODULES.items():
        made = trace(method, padding="left_padding")
        both = lockstep.pair(method, module, config=made.options, **made.sizes)
        for _ in range(2):
            both.prefill(**made.prompt_inputs)
            for step in range(4):
                both.step(**made.step_inputs(step))
                both.reorder(torch.tensor([1, 1] if step == 1 else [1, 0]))
                both.append_block(**made.prompt_inputs)
            both.reset()


class MixesRows:
    """reorder does not move the sums of the rows."""

    def reorder(self, index):
        score = self.score.clone()
        super().reorder(index)
        self.score.copy_(torch.where(self.occupied, score, -torch.inf))


def test_a_reorder_that_forgets_the_sums_is_noticed():
    made = trace("h2o")
    both = lockstep.pair("h2o", faulty("h2o", MixesRows), MODULES["h2o"], config=made.options, **made.sizes)
    both.prefill(**made.prompt_inputs)
    with pytest.raises(Mismatch, match="score after reorder"):
        both.reorder(torch.tensor([1, 0]))


# The comparator by itself --------------------------------------------------------------------------------------------

MASK = torch.tensor([[True] * 5 + [False]])
AGE = torch.tensor([[7, 2, 9, 4, 5, -1]])


def keep_mask(*slots: int) -> torch.Tensor:
    return torch.zeros(1, 6, dtype=torch.bool).index_fill(1, torch.tensor(slots, dtype=torch.int64), True)


def judged(held, *, scores=(1.0, 2.0, 3.0, 4.0, 5.0, 0.0), protected=(), budget=3, tie=None, error=0.0, truth=None):
    score = torch.tensor([scores], dtype=torch.float64)
    return assert_kept_by_age_right(
        held, truth if truth is not None else held, Interval(score - error, score + error), occupied=MASK,
        protected=keep_mask(*protected), age=AGE, budget=budget, tie=tie,
    )


def test_evicts_by_score_then_protected_by_age():
    assert bool(judged(keep_mask(2, 3, 4)).decisive.all())
    assert not bool(judged(keep_mask(0, 1, 2, 3, 4), budget=5).scored.any()), "no row may be over budget"
    judged(keep_mask(0, 3, 4), protected=(0,))
    # Of three protected tokens with ages 7, 2 and 9 and a budget of two, the newest are kept, whatever their scores.
    judged(keep_mask(0, 2), protected=(0, 1, 2), budget=2)


@pytest.mark.parametrize(("held", "options", "says"), [
    (keep_mask(1, 3, 4), {}, "token 2 is evicted with a score"),
    (keep_mask(3, 4), {}, "expected 3 of 5 tokens to be kept, got 2"),
    (keep_mask(1, 2, 3, 4), {"budget": 5}, "although the budget has room"),
    (keep_mask(2, 3, 4), {"protected": (0,)}, "protected slots"),
    (keep_mask(1, 2), {"protected": (0, 1, 2), "budget": 2}, r"newest protected .* \[0, 2\], got \[1, 2\]"),
    (keep_mask(0, 2, 4), {"scores": (1.0, 1.0, 1.0, 1.0, 5.0, 0.0), "tie": torch.tensor([[0, 0, 0, 0, 4, 5]])},
     "the lower index must be evicted first"),
])
def test_wrong_keep_masks_are_found(held, options, says, monkeypatch):
    with pytest.raises(Mismatch, match=says):
        judged(held, **options)


def test_keep_masks_within_the_bounds_are_adjudicated():
    verdict = judged(keep_mask(1, 3, 4), truth=keep_mask(2, 3, 4), error=0.5)
    assert bool(verdict.adjudicated.all()) and not bool(verdict.decisive.any())


def test_an_oracle_that_is_wrong_by_its_own_bounds_is_an_error_of_the_judge():
    with pytest.raises(JudgeError, match="contradicts itself"):
        judged(keep_mask(2, 3, 4), truth=keep_mask(0, 1, 2))
