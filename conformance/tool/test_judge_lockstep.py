"""Tests of the judge: lockstep accepts a right state and detects each kind of fault.

The states under test are the reference's in float32 or 16 bits, unchanged or with one fault.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import registry, stats
from kvtwin.conformance.cases.case import KINDS, Case
from kvtwin.conformance.cases.oracle import upcast
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.reference import longflow
from kvtwin.reference.longflow import LongFlowState


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


def config(**options) -> tuple:
    return tuple({"budget": 6, **options}.items())


TRACES = {
    "steps": StateTrace(batch=2, key_value_heads=2, group=2, config=config(), steps=14, seed=1),
    "per head": StateTrace(batch=2, key_value_heads=2, config=config(per_head=True, sinks=1), steps=14, seed=2),
    "prompt": StateTrace(batch=2, group=3, config=config(window=3), prompt=20, padding="left_padding", steps=9, seed=3),
    "prompt per head": StateTrace(
        key_value_heads=2, config=config(per_head=True, sinks=2, window=2), prompt=17, steps=9, seed=4,
        dtype=torch.bfloat16,
    ),
    "short prompt": StateTrace(
        batch=3, config=config(sinks=2, protect_newest=False), prompt=4, padding="left_padding", steps=9, seed=5,
        dtype=torch.float16,
    ),
    "budget 1": StateTrace(batch=2, config=config(budget=1), prompt=5, steps=4),
}


class Faulty:
    """A stand-in for the module under test: the reference's, with a faulty state."""

    def __init__(self, state: type[LongFlowState]) -> None:
        self.LongFlowConfig, self.LongFlowState = longflow.LongFlowConfig, state


@pytest.mark.parametrize("name", TRACES)
def test_a_right_state_passes(name):
    trace = TRACES[name]
    with stats.collect() as seen:
        summary = lockstep.run(trace, longflow)
    assert summary.steps == trace.steps and seen.total >= seen.decisive >= summary.decisive
    if name != "budget 1":
        assert summary.decisive >= 4, "the trace must be long enough to be meaningful"
    assert 0 < seen.bound_utilisation <= 1


class StaleSlot(LongFlowState):
    """The value of the new token is not written."""

    def step(self, query, key, value):
        before = self.value.clone()
        full = bool(self.occupied.all())
        output = super().step(query, key, value)
        if full:
            self.value = before
        return output


class WrongPositions(LongFlowState):
    """Positions are slots instead of token positions."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        self.positions = torch.where(self.positions >= 6, self.positions - 1, self.positions)
        return output


class EvictsNewest(LongFlowState):
    """The token just written is evicted next."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        if bool(self.occupied.all()):
            self.next_slot = self.positions.argmax(-1)
        return output


class ProtectsNothing(LongFlowState):
    """Nothing is protected, and scores show no protection."""

    def _protected(self):
        return self.occupied & False


class WrongVictim(LongFlowState):
    """The best token is evicted instead of the worst."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        if bool(self.occupied.all()):
            self.next_slot = self.score.masked_fill(self.score.isinf(), -1).argmax(-1)
        return output


class NeverFills(LongFlowState):
    """It evicts although a slot is free."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        self.next_slot = torch.zeros_like(self.next_slot)
        return output


class ForgetsACounter(LongFlowState):
    def step(self, query, key, value):
        output = super().step(query, key, value)
        self._seen += int(self._seen == 9)
        return output


class SpoiltOutput(LongFlowState):
    """One element has a relative error of 1/4096."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        output[-1, -1, 0] *= 1 + 2.0**-12
        return output


class SpoiltScore(LongFlowState):
    """The score is summed over query heads, not averaged: the choices are equal, but not the scores."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        self.score = self.score * self.sizes.query_heads
        return output


class GhostSlots(LongFlowState):
    """A slot is marked as occupied before it has a token."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        self.occupied[0, -1] = True
        return output


class Unsure(LongFlowState):
    """The output has another dtype."""

    def step(self, query, key, value):
        return super().step(query, key, value).double()


@pytest.mark.parametrize(("state", "says"), [
    (StaleSlot, "value at step 6"), (WrongPositions, "positions at step 6"), (EvictsNewest, "which is protected"),
    (ProtectsNothing, "score of the last step.*expected inf"), (WrongVictim, "scores less"),
    (NeverFills, "the lowest free slot"), (ForgetsACounter, "tokens_seen at step 8"),
    (SpoiltOutput, "output at step"), (SpoiltScore, "score of the last step"), (GhostSlots, "occupied at step 0"),
    (Unsure, "dtype"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_faulty_step_is_noticed(state, says):
    with pytest.raises(Mismatch, match="(?s)" + says), stats.collect():
        lockstep.run(TRACES["steps"], Faulty(state))


class KeepsTheWorst(LongFlowState):
    def _select_prompt_tokens(self, query, key, value, occupied):
        kept = super()._select_prompt_tokens(query, key, value, occupied)
        gone = [token for token in range(key.shape[2] - 3) if token not in kept[0]]
        return torch.cat([kept[:, 1:], kept.new_tensor([gone[:1]])], 1).sort(-1).values


class KeepsInAnotherOrder(LongFlowState):
    def _select_prompt_tokens(self, query, key, value, occupied):
        return super()._select_prompt_tokens(query, key, value, occupied).flip(-1)


class MixesPromptHeads(LongFlowState):
    """KV heads have each other's values."""

    def prefill(self, query, key, value, occupied=None):
        output = super().prefill(query, key, value, occupied)
        self.value = self.value.flip(1)
        return output


class SeesTheFuture(LongFlowState):
    """The prompt's attention is not causal."""

    def prefill(self, query, key, value, occupied=None):
        output = super().prefill(query, key, value, occupied)
        return output.flip(2)


@pytest.mark.parametrize(("state", "says"), [
    (KeepsTheWorst, "tokens kept of the prompt.*is evicted"), (KeepsInAnotherOrder, "ascend"),
    (MixesPromptHeads, "value after the prompt"), (SeesTheFuture, "prefill's output"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_faulty_prompt_is_noticed(state, says):
    trace = StateTrace(key_value_heads=2, config=config(window=3), prompt=20, steps=1, seed=3)
    with pytest.raises(Mismatch, match=says), stats.collect():
        lockstep.run(trace, Faulty(state))


class PicksTheLast(LongFlowState):
    """In near ties, one ulp apart, it chooses another token than float64, within the bound."""

    def step(self, query, key, value):
        output = super().step(query, key, value)
        score = self.score.masked_fill(~self.occupied, torch.inf)
        if bool(self.occupied.all()):
            near = score <= score.amin(-1, keepdim=True) * (1 + 2.0**-22)
            index = torch.arange(score.shape[-1])
            self.next_slot = index.where(near, -1).amax(-1)
        return output


def near_tie_tokens(steps: int) -> dict[str, Tensor]:
    """Tokens of one head whose values differ only by ulps of one channel. Keys and queries are 0, so weights are
    equal."""
    value = torch.ones(1, 1, steps, 16)
    value[0, 0, :, 0] += torch.arange(steps) * 2.0**-23
    return {"query": torch.zeros_like(value), "key": torch.zeros_like(value), "value": value}


def test_a_legal_tie_is_adopted_and_the_rest_of_the_trace_stays_comparable():
    trace = StateTrace(config=config(protect_newest=False), steps=20)
    trace._adopt(near_tie_tokens(20))
    with stats.collect() as seen:
        summary = lockstep.run(trace, Faulty(PicksTheLast))
    assert summary.adjudicated > 3 and seen.ties == summary.adjudicated


class KeepsAnother(LongFlowState):
    """In near ties of a prompt it keeps other tokens than float64, within the bound."""

    def _select_prompt_tokens(self, query, key, value, occupied):
        kept = super()._select_prompt_tokens(query, key, value, occupied)
        return torch.where(kept == kept[:, :1], 0, kept) if bool((kept[:, 0] > 0).all()) else kept


@pytest.mark.parametrize("per_head", [False, True])
def test_a_legal_choice_of_the_prompt_is_adopted(per_head):
    prompt = {f"prompt_{name}": tensor for name, tensor in near_tie_tokens(12).items()}
    # All keys differ by an ulp, so their scores differ by less than the bound.
    prompt["prompt_query"] = torch.ones(1, 1, 12, 16)
    key = torch.ones(12) + torch.arange(12) * 2.0**-23
    prompt["prompt_key"] = torch.zeros(1, 1, 12, 16)
    prompt["prompt_key"][0, 0, :, 0] = key
    options = config(budget=5, window=2, kernel_size=1, protect_newest=False, per_head=per_head)
    trace = StateTrace(config=options, prompt=12, steps=6)
    trace._adopt({**near_tie_tokens(6), **prompt, "prompt_occupied": None})
    with stats.collect():
        summary = lockstep.run(trace, Faulty(KeepsAnother))
    assert summary.adjudicated >= 1 and summary.steps == 6


def test_reset_and_reorder_are_followed():
    trace = TRACES["prompt"]
    both = lockstep.pair("longflow", longflow, longflow, config=trace.options, **trace.sizes)
    for _ in range(2):
        both.prefill(**trace.prompt_inputs)
        for step in range(4):
            both.step(**trace.step_inputs(step))
            both.reorder(torch.tensor([1, 1] if step == 1 else [1, 0]))
        both.reset()


def test_a_reorder_that_forgets_a_part_is_noticed():
    class Forgetful(LongFlowState):
        def reorder(self, index):
            positions = self.positions
            super().reorder(index)
            self.positions = positions

    trace = TRACES["prompt"]
    both = lockstep.pair("longflow", Faulty(Forgetful), longflow, config=trace.options, **trace.sizes)
    both.prefill(**trace.prompt_inputs)
    with pytest.raises(Mismatch, match="positions after reorder"):
        both.reorder(torch.tensor([1, 0]))


# What judge/checkers/<method>.py may define ------------------------------------------------------------------------


def test_every_judge_is_found_by_its_name():
    assert {"longflow", "snapkv"} <= checkers.every().keys()
    assert checkers.checker_of("nothing") is None and checkers.ask("nothing", "SMALL", {"budget": 2}) == {"budget": 2}
    with pytest.raises(LookupError, match="longflow"):
        checkers.pair("nothing")


@pytest.mark.parametrize(("state", "says"), [
    (None, None), (StaleSlot, "value at step 6"), (WrongVictim, "positions at step"), (SpoiltOutput, "output at step"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_states_without_a_checker_must_agree_exactly(state, says, monkeypatch):
    """The default adapter checks attention and slots, but no scores."""
    monkeypatch.setattr(registry, "checker_of", lambda name: None)
    with stats.collect():
        if state is None:
            assert lockstep.run(TRACES["prompt"], longflow).steps == 9
        else:
            with pytest.raises(Mismatch, match=says):
                lockstep.run(TRACES["steps"], Faulty(state))


def test_a_choice_made_within_a_step_is_adopted_before_slots_are_compared(monkeypatch):
    """For a method that evicts within the step: slots differ until `before_slots` adopts the choice."""
    class Adapter(lockstep.Adapter):
        def before_slots(self, tested, reference, token):
            calls.append(sorted(token))
            if adopts:
                for name in ("positions", "key", "value", "next_slot"):
                    setattr(reference, name, upcast(getattr(tested, name)).clone())

    calls: list[list[str]] = []
    adopts = True
    monkeypatch.setattr(checkers.checker_of("longflow"), "Adapter", Adapter)
    trace = StateTrace(config=config(protect_newest=False), steps=12)
    trace._adopt(near_tie_tokens(12))
    lockstep.run(trace, Faulty(PicksTheLast))
    assert calls == [["key", "query", "value"]] * 12
    adopts = False
    with pytest.raises(Mismatch, match="positions at step"):
        lockstep.run(trace, Faulty(PicksTheLast))


def test_case_classes_register_their_kind():
    class OtherCase(Case):
        kind = "other"

    assert KINDS.pop("other") is OtherCase
    assert KINDS.keys() >= {"decode", "window", "state"}
