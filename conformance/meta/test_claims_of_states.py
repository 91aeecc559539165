"""Claims about states are about the states here: if a state does the same one step late, its claims fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.epikv import test_epikv as epikv_tests
from kvtwin.conformance.keydiff import test_keydiff_claims_blocks as keydiff_tests
from kvtwin.conformance.longflow import test_longflow_claims_state as longflow_tests
from kvtwin.conformance.synckv import test_synckv_claims_schedule as synckv_tests
from kvtwin.conformance.thinkv import test_thinkv_claims_cases as thinkv_tests
from kvtwin.reference import epikv, keydiff, longflow, synckv, thinkv
from kvtwin.reference.epikv.scorer import EpiKVScorer


def previous_slot(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The slot for the next token is the one that the step before chose."""
    original = getattr(owner, name)

    def late(self: Any, *arguments: Any) -> Any:
        before = self._next_slot
        result = original(self, *arguments)
        self._next_slot = before
        return result

    monkeypatch.setattr(owner, name, late)


def late_longflow(monkeypatch: pytest.MonkeyPatch) -> None:
    previous_slot(monkeypatch, longflow.LongFlowState, "step")


def late_epikv(monkeypatch: pytest.MonkeyPatch) -> None:
    previous_slot(monkeypatch, EpiKVScorer, "_choose")


def late_keydiff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block after which there are too many tokens evicts none."""
    original = keydiff.KeyDiffState._keep_mask

    def late(self: Any, rank: torch.Tensor, protected: torch.Tensor) -> torch.Tensor:
        keep = original(self, rank, protected)
        if not keep.all() and not getattr(self, "late", False):
            self.late = True
            return torch.ones_like(keep)
        return keep

    monkeypatch.setattr(keydiff.KeyDiffState, "_keep_mask", late)


def late_synckv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every anticipation is one step late."""
    original = synckv.SyncKVState._allocate

    def late(self: Any) -> None:
        original(self)
        self._steps -= 1

    monkeypatch.setattr(synckv.SyncKVState, "_allocate", late)


def late_thinkv(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transition reduces the segments before it one step after it has ended."""
    original = thinkv.ThinKVState._evict

    def late(self: Any, trajectory_change: torch.Tensor) -> None:
        before = getattr(self, "late", torch.zeros_like(trajectory_change))
        self.late = trajectory_change
        original(self, before)

    monkeypatch.setattr(thinkv.ThinKVState, "_evict", late)


@dataclass(frozen=True)
class Moved:
    """How to move a state by one step, and tests of claims that must see it."""

    move: Callable[[pytest.MonkeyPatch], None]
    module: Any
    fixture: str
    tests: tuple[tuple[Callable[..., None], dict[str, Any]], ...]


STATES = {
    "longflow": Moved(
        late_longflow, longflow, "longflow",
        (
            (longflow_tests.test_budget_holds_at_every_step, {}),
            (longflow_tests.test_protected_newest_token_survives_the_next_step, {}),
        ),
    ),
    "epikv": Moved(late_epikv, epikv, "side", ((epikv_tests.test_streaming_keeps_what_select_keeps_of_the_whole, {}),)),
    "keydiff": Moved(
        late_keydiff, keydiff, "keydiff", ((keydiff_tests.test_budget_holds_after_every_block, {}),)
    ),
    "synckv": Moved(
        late_synckv, synckv, "synckv",
        (
            (synckv_tests.test_age_of_the_set_is_from_one_to_m, {"stride": 3}),
            (synckv_tests.test_age_rejects_a_set_that_is_used_at_once, {}),
            (synckv_tests.test_eq_8_contradicts_eq_7_at_the_end_of_each_interval, {"stride": 3}),
        ),
    ),
    "thinkv": Moved(
        late_thinkv, thinkv, "thinkv",
        (
            (thinkv_tests.test_each_transition_reduces_every_earlier_segment_by_one_level, {}),
            (thinkv_tests.test_two_windows_of_one_type_are_two_segments, {}),
        ),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_claims_of_a_state_that_is_a_step_late_fail(name, monkeypatch):
    case = STATES[name]
    arguments = {case.fixture: case.module, "device": torch.device("cpu")}
    for test, options in case.tests:
        test(**arguments, **options)
    case.move(monkeypatch)
    for test, options in case.tests:
        with pytest.raises(Exception) as found:
            test(**arguments, **options)
        # Hypothesis raises a group for several failures.
        errors = found.value.exceptions if isinstance(found.value, ExceptionGroup) else [found.value]
        assert all(isinstance(error, AssertionError) for error in errors), errors


def test_every_method_with_claims_has_its_state_moved():
    own = {pair.name for pair in discovery.methods() if not pair.path.startswith("baselines.")}
    assert set(STATES) == own
