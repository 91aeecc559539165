"""What the tests of all methods' states run on each rank. `new_state` makes a small state of this rank's heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ... import discovery
from ...cases.draws import at_least
from ...cases.state_trace import StateTrace
from ...judge import checkers, lockstep
from ...judge.compare import assert_same
from . import sharded

BUDGET = 4
SIZES = {"batch": 2, "query_heads": 2, "key_value_heads": 1, "head_dim": 16, "dtype": torch.float32}


def spread(trace: StateTrace, heads: tuple[int, int, int], **config: Any) -> StateTrace:
    """The trace with these ranks, KV heads and query heads per KV head, and these options."""
    options = tuple({**dict(trace.config), **config}.items())
    return replace(trace, key_value_heads=heads[1], group=heads[2], config=options)


def here(case: Any) -> Any:
    """The case on the device of this rank."""
    return replace(case, device=f"cuda:{torch.cuda.current_device()}") if case.device.startswith("cuda") else case


def pair(method: str) -> Any:
    return next(one for one in discovery.pairs() if one.name == method)


def side_of(side: str, method: str) -> Any:
    return getattr(pair(method), side)


def keeps_step(
    group: Any, side: str, trace: StateTrace, prepare: Callable[[Any], None] | None = None
) -> lockstep.Summary:
    """Run a trace on states of all ranks, and on a float64 reference state of all heads. prepare: changes this rank's
    state first."""
    return lockstep.run(here(trace), module(group, side, trace.method, prepare))


def module(group: Any, side: str, method: str, prepare: Callable[[Any], None] | None = None) -> Any:
    """A stand-in for the method's module, whose state is spread over the ranks."""
    found = pair(method)
    return sharded.module_of(getattr(found, side), found.state.__name__, group, prepare)


def keeps_step_in_a_part(group: Any, side: str, trace: StateTrace, members: list[int]) -> None:
    """`keeps_step` on a process group of some of all ranks. The others wait for its end."""
    part = torch.distributed.new_group(members)
    if group.rank() in members:
        keeps_step(part, side, trace)
    torch.distributed.barrier(group)


def new_state(group: Any, side: str, method: str, device: str, on_rank_1: dict[str, Any] | None = None) -> Any:
    """A small state. on_rank_1: the sizes and the options of the config that differ on rank 1."""
    found, given = pair(method), {**SIZES, "device": device}
    options = (on_rank_1 or {}) if group.rank() == 1 else {}
    budget, more = options.get("budget", BUDGET), {name: one for name, one in options.items() if name != "budget"}
    given |= {name: one for name, one in more.items() if name in (*given, "replicas")}
    config = checkers.small_config(found, budget, {name: one for name, one in more.items() if name not in given})
    return getattr(getattr(found, side), found.state.__name__)(
        config, process_group=group, **given
    )


def tokens(state: Any, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Random arguments of `step`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        drawn = [torch.randn(2, heads, 16, generator=generator).to(state.device) for heads in (2, 1, 1)]
        more = checkers.extras(state, *drawn)
        found.append({**dict(zip(("query", "key", "value"), drawn, strict=True)), **more})
    return found


def constructs(group: Any, side: str, method: str, device: str, on_rank_1: dict[str, Any]) -> str | None:
    """What the constructor says on this rank."""
    try:
        new_state(group, side, method, device, on_rank_1)
    except ValueError as error:
        return str(error)
    return None


def prompts_that_differ(group: Any, side: str, method: str, device: str, on_rank_1: dict[str, Any]) -> str:
    """What prefill says on this rank if a prompt differs on rank 1. If it says something, the state is as before."""
    given = {"tokens": 9, "padding": 0, **(on_rank_1 if group.rank() == 1 else {})}
    count = given["tokens"]
    query, key = (torch.ones(2, heads, count, 16, device=device) for heads in (2, 1))
    occupied = (torch.arange(count, device=device) >= given["padding"]).expand(2, -1).contiguous()
    state = new_state(group, side, method, device)
    try:
        state.prefill(query, key, key, occupied, **checkers.extras(state, query, key, key))
    except ValueError as error:
        token = tokens(state, 1, 0)[0]
        fresh = new_state(group, side, method, device)
        assert_same(state.step(**token), fresh.step(**token), what="output after the error")
        return str(error)
    return ""


def copies(group: Any, side: str, method: str, device: str) -> None:
    """A copy of a state goes on by itself, with the same ranks."""
    state = new_state(group, side, method, device)
    given = tokens(state, 12, group.rank())
    for token in given[:6]:
        state.step(**token)
    copied = copy.deepcopy(state)
    outputs = [one.step(**token) for one in (state, copied) for token in given[6:]]
    for one, other in zip(outputs[:6], outputs[6:], strict=True):
        assert_same(one, other, what="output of the copy")


def interrupted(group: Any, side: str, method: str, device: str) -> str:
    """Let a step fail where the ranks meet, on all of them. Returns what the state says of another step. After a reset
    it steps as a new state does."""
    states = [new_state(group, side, method, device) for _ in range(2)]
    token = tokens(states[0], 1, 0)[0]
    with pytest.MonkeyPatch.context() as patch:
        for collective in ("all_gather_object", "all_gather_into_tensor", "all_gather_single"):
            patch.setattr(torch.distributed, collective, fails, raising=False)
        with pytest.raises(ConnectionError):
            for _ in range(8):  # some methods meet at every few steps only
                states[0].step(**token)
    with pytest.raises(RuntimeError) as said:
        states[0].step(**token)
    states[0].reset()
    assert_same(states[0].step(**token), states[1].step(**token), what="output after reset")
    return str(said.value)


def fails(*_: Any, **__: Any) -> None:
    raise ConnectionError("a rank is gone")


def fewer(most: int) -> int:
    """The examples of a test on ranks, each of which is judged on every rank."""
    return max(at_least(3), most // 5)
