"""Tests of the judge: with slot_order = "any", lockstep accepts tokens in any slots and detects each kind of fault."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance import Capabilities, capabilities, discovery, stats
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import DECIDED, state_traces
from kvtwin.conformance.harness import results, verdict
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.judge.slot_order import InOrder

ANY = Capabilities(slot_order="any")
ORDERED = [
    pair for pair in discovery.methods() if checkers.ask(pair.name, "Adapter", lockstep.Adapter).any_slot_order
]
BY_SLOT = ("key", "value", "occupied", "positions", "score")
THOUGHTS = {"policy": "segment_hs", "tau": 2, "edges": (0.8, 0.88), "segments_by": "entropy"}


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


class ByAge:
    """A reference's state, whose attributes have the newest token first, then free slots, of which some are left
    out."""

    def __init__(self, state: Any, left_out: int) -> None:
        self._state, self._left_out = state, left_out

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        if name == "next_slot":
            return (self._order() == value[..., None]).long().argmax(-1)
        return self._moved(name, value) if name in (*BY_SLOT, "thoughts") and value is not None else value

    def _order(self) -> Tensor:
        return self._state.positions.argsort(dim=-1, descending=True, stable=True)

    def _moved(self, name: str, value: Tensor) -> Tensor:
        most = int(self._state.occupied.sum(-1).max())
        order = self._order()
        order = order[..., :max(most + 1, order.shape[-1] - self._left_out)]
        if value.dim() == 4:
            order = (order if order.dim() == 3 else order[:, None]).expand(-1, value.shape[1], -1)[..., None]
            return value.take_along_dim(order, 2)
        return value.gather(-1, order)


def module_of(pair: Any, view: type = ByAge, **options: Any) -> Any:
    """The reference's module of a method with a state that is seen through `view`."""
    def state(*args: Any, **sizes: Any) -> Any:
        return view(getattr(pair.reference, pair.state.__name__)(*args, **sizes), **options)

    return types.SimpleNamespace(**{pair.state.__name__: state})


def trace_of(pair: Any, **changes: Any) -> StateTrace:
    config = checkers.small_config(pair, 4, {})
    return StateTrace(**{
        "method": pair.name, "config": tuple(vars(config).items()), "batch": 2, "key_value_heads": 2, "group": 2,
        "prompt": 9, "steps": 7, "seed": 1, "padding": "left_padding", **changes,
    })


every = pytest.mark.parametrize("pair", ORDERED, ids=str)


def test_states_that_evict_tokens_may_have_any_order():
    baselines = {pair.name for pair in discovery.methods() if pair.is_baseline and pair.takes_blocks}
    assert {"longflow", "keydiff", "epikv", *baselines} <= {pair.name for pair in ORDERED}


@pytest.mark.slow_on_cpu
@every
@given(data=st.data(), left_out=st.sampled_from((0, 1, 99)))
@settings(max_examples=max(3, settings().max_examples // 6))
def test_tokens_may_lie_in_any_slots(pair, data, left_out):
    with capabilities.use(ANY):
        trace = data.draw(state_traces(pair.name, device="cpu", content=DECIDED))
        lockstep.run(trace, module_of(pair, left_out=left_out))


@every
def test_by_default_slots_have_an_order(pair):
    with pytest.raises(Mismatch, match="positions|tokens must ascend"):
        lockstep.run(trace_of(pair), module_of(pair, left_out=0))


class Faulty(ByAge):
    """One attribute is wrong in the slot of the newest token of the last row."""

    def __init__(self, state: Any, name: str) -> None:
        super().__init__(state, 0)
        self._name = name

    def _moved(self, name: str, value: Tensor) -> Tensor:
        value = super()._moved(name, value).clone()
        if name == self._name and self._state.tokens_seen > 9:
            last = value[-1, ..., 0, :] if value.dim() == 4 else value[-1, ..., 0]
            last.copy_(~last if value.dtype == torch.bool else torch.where(last == torch.inf, 1, last + 1))
        return value


@pytest.mark.parametrize("name", BY_SLOT)
@every
def test_what_a_slot_holds_is_still_compared(name, pair):
    if name == "score" and not checkers.ask(pair.name, "SCORED", True):
        pytest.skip("no scores")
    with capabilities.use(ANY), stats.collect(), pytest.raises(Mismatch, match=name):
        lockstep.run(trace_of(pair), module_of(pair, Faulty, name=name))


def test_thoughts_follow_their_tokens():
    (pair,) = (one for one in ORDERED if one.name == "epikv")
    trace = trace_of(pair, config=tuple(vars(checkers.small_config(pair, 4, THOUGHTS)).items()), prompt=0, steps=12)
    with capabilities.use(ANY), stats.collect():
        lockstep.run(trace, module_of(pair, left_out=0))
        with pytest.raises(Mismatch, match="thoughts"):
            lockstep.run(trace, module_of(pair, Faulty, name="thoughts"))
    with stats.collect(), pytest.raises(Mismatch, match="positions"):
        lockstep.run(trace, module_of(pair, left_out=0))


def test_a_state_without_slots_holds_nothing():
    """Of a batch in which no row has a token yet."""
    sizes = (2, 3)
    tested = types.SimpleNamespace(
        occupied=torch.zeros(*sizes, 0, dtype=torch.bool), positions=torch.zeros(*sizes, 0, dtype=torch.int64),
        key=torch.zeros(*sizes, 0, 8), score=torch.zeros(*sizes, 0), next_slot=torch.zeros(sizes, dtype=torch.int64),
    )
    reference = types.SimpleNamespace(positions=torch.full((*sizes, 4), -1))
    seen = InOrder(tested, reference)
    assert not seen.occupied.any() and seen.occupied.shape == (*sizes, 4)
    assert seen.positions.eq(-1).all() and seen.score.eq(-torch.inf).all()
    assert seen.key.shape == (*sizes, 4, 8)
    assert seen.next_slot.eq(0).all()


@pytest.mark.parametrize("pair", discovery.methods(), ids=str)
def test_a_verdict_says_where_the_convention_does_not_apply(pair):
    test = results.Result("test_state", method=pair.name, judges="state", touched=True, cases=8)
    found = verdict.judge([test], {pair.name: ANY}, device="cpu")[pair.name]
    if pair in ORDERED:
        assert (found.conventions, found.outside) == (["slot_order = any"], [])
    else:
        says = f"slot_order = any (does not apply to {pair.name}, whose slots are compared as they are)"
        assert (found.conventions, found.outside) == ([], [says])
