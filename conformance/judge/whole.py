"""Prompts of several blocks that a block cache gets whole.

Lockstep gives a block cache one block after the other, since it judges the choice after each. Here a second state gets
whole prompts, and must then hold the same tokens in the same slots. Its outputs have the same truth and bounds.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from .. import capabilities
from ..cases.state_trace import StateTrace
from . import checkers, host, lockstep
from .compare import assert_dtype, assert_same, assert_within
from .fields import field


def run(trace: StateTrace, tested: Any) -> lockstep.Summary:
    """Run a trace with one layer, until a choice is not decisive: the second state may then choose otherwise. `tested`:
    the method's module of the implementation under test. Raises compare.Mismatch."""
    on_host = host.judges(trace)
    both = lockstep.pair(trace.method, tested, config=trace.options, on_host=on_host, **trace.sizes)
    config = checkers.pair(trace.method).config
    assert config is not None
    state = getattr(tested, checkers.state_name(trace.method))(config(**trace.options), **trace.sizes)
    if on_host:
        state = host.OnHost(state, trace.sizes["device"])
    here = host.to_cpu if on_host else lambda value: value
    turns, step = dict(trace.turns), 0
    if trace.prompt:
        _feed("prefill", both, state, here(trace.prompt_of(0)))
    while step < trace.steps and not both.summary.undecided:
        if step in turns:
            _feed("append_block", both, state, here(trace.turn_inputs(step, turns[step])))
        else:
            token = here(trace.step_inputs(step))
            both.step(**token)
            state.step(**token)
            _compare(both, state, f"at step {step} after a prompt that was given whole")
        step += turns.get(step, 1)
    return both.summary


def _feed(method: str, both: lockstep.Lockstep, state: Any, given: dict[str, Tensor | None]) -> None:
    tokens = {name: tensor for name, tensor in given.items() if tensor is not None}
    with capabilities.use(both.conventions):
        _, truth, bound = getattr(both.adapter, method)(both.tested, both.reference, tokens)
        both.summary.add(both.adapter.after_prompt(both.tested, both.reference, lockstep.whole(tokens)))
    output = getattr(state, method)(**tokens)
    if both.summary.undecided:
        return
    _compare(both, state, f"after {method} of several blocks")
    with field("output"):
        assert_dtype(output, tokens["query"].dtype, what="output")
        assert_within(output, truth, bound, what=f"output of {method} of several blocks")


def _compare(both: lockstep.Lockstep, state: Any, when: str) -> None:
    if both.summary.undecided:
        return
    if both.conventions.slot_order == "any":
        held = [one.positions.sort(-1).values for one in (state, both.tested)]  # of free slots -1: these come first
        most = max(one.shape[-1] for one in held)
        padded = [functional.pad(one, (most - one.shape[-1], 0), value=-1) for one in held]
        assert_same(*padded, what=f"positions {when}, ascending")
        return
    for name in ("positions", "occupied"):
        assert_same(getattr(state, name), getattr(both.tested, name), what=f"{name} {when}")
    expected = both.adapter.contents(both.tested)
    for name, one in both.adapter.contents(state).items():
        where = both.tested.occupied.view(*both.tested.occupied.shape, *[1] * (one.dim() - 3))
        assert_same(one, expected[name], where=where, what=f"{name} {when}")
