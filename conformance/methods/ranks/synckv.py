"""What the tests of SyncKV run on each rank, besides those of all states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ....reference.contract.synckv.types import HeadClusters
from ...cases.state_trace import StateTrace
from ...judge import lockstep
from ...judge.compare import assert_same
from . import states


def keeps_step(group: Any, side: str, trace: StateTrace, clusters: HeadClusters | None, captured: bool) -> None:
    """Run a trace on states of all ranks, and on a float64 reference state of all heads."""
    tested = states.module(group, side, "synckv", _capture if captured else None)
    reference = states.side_of("reference", "synckv")
    lockstep.run(states.here(trace), _with_clusters(tested, clusters), _with_clusters(reference, clusters))


def _with_clusters(method: Any, clusters: HeadClusters | None) -> Any:
    """A stand-in for the method's module, whose states have these clusters."""
    return SimpleNamespace(
        SyncKVState=lambda config, **sizes: method.SyncKVState(config, head_clusters=clusters, **sizes)
    )


def _capture(state: Any) -> None:
    """As if a step had been captured."""
    if hasattr(state, "_expect_replays"):
        state._expect_replays()


def does_as_one_rank(group: Any, side: str, trace: StateTrace) -> None:
    """All ranks select, and attend to, what a state of all heads does."""
    case = states.here(trace)
    config = states.pair("synckv").config(**case.options)
    both = [
        one.SyncKVState(config, **case.sizes)
        for one in (states.module(group, side, "synckv"), states.side_of(side, "synckv"))
    ]
    outputs = [state.prefill(**case.prompt_inputs) for state in both]
    for step in range(case.steps):
        outputs = [state.step(**case.step_inputs(step)) for state in both]
        for name in ("static", "chosen"):
            assert_same(getattr(both[0], name), getattr(both[1], name), what=f"{name} after step {step}")
        assert_same(*outputs, what=f"output of step {step}")


def constructs(group: Any, side: str, device: str, clusters: HeadClusters) -> str:
    """What the constructor says to these clusters, with one KV head on each rank."""
    method = states.side_of(side, "synckv")
    try:
        method.SyncKVState(
            method.SyncKVConfig(k=4, clusters=1, max_tokens=24), clusters, process_group=group, device=device,
            **states.SIZES,
        )
    except ValueError as error:
        return str(error)
    return ""
