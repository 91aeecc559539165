"""What the tests of LongFlow run on each rank."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from ...reference.longflow import LongFlowConfig
from ..cases.case import StateTrace, WindowCase
from ..cases.paged_states import module_of
from ..cases.paged_view import PagedLayout
from ..judge import lockstep
from ..judge.checkers import snapkv as judge
from ..judge.compare import assert_same
from . import sharded


def method(side: str) -> Any:
    return importlib.import_module(f"kvtwin.{side}.longflow")


def here(case: Any) -> Any:
    """The case on the device of this rank."""
    return replace(case, device=f"cuda:{torch.cuda.current_device()}") if case.device.startswith("cuda") else case


def keeps_step(group: Any, side: str, trace: StateTrace) -> None:
    """Run a trace on states of all ranks, and on a float64 reference state of all heads."""
    lockstep.run(here(trace), sharded.module_of(method(side), "LongFlowState", group))


def keeps_step_over_pages(group: Any, side: str, trace: StateTrace) -> None:
    """`keeps_step`, with the tokens of each rank in pages of its own."""
    paged = module_of(method(side), "LongFlowState", PagedLayout(4, seed=group.rank()))
    lockstep.run(here(trace), sharded.module_of(paged, "LongFlowState", group))


def compresses(group: Any, side: str, case: WindowCase) -> None:
    """Compress a prompt whose heads are spread over the ranks, with the functions of LongFlow and SnapKV."""
    case = here(case)
    spread = sharded.shares(case.key_value_heads * case.group, case.key_value_heads, group.size())
    mine = spread[group.rank()]
    inputs = {**case.snapkv_inputs, "process_group": group}
    inputs["query_window"] = inputs["query_window"][:, slice(*mine.query)]
    for name in ("key", "value"):
        inputs[name] = inputs[name][:, slice(*mine.key_value)]
    snapkv = importlib.import_module(f"kvtwin.{side}.baselines.snapkv")
    compress_prefill = method(side).compress_prefill
    for key, value, kept in (
        snapkv.compress(**inputs, shared_heads=True), compress_prefill(**inputs, window=case.observers),
    ):
        whole = [sharded.once(tensor, "compressed tokens", group, spread) for tensor in (key, value)]
        judge.assert_compress_right((*whole, kept), case)
        sharded.assert_same_on_all_ranks(kept, "kept", group)
    names = ("query_window", "key", "occupied", "kernel_size", "scale", "process_group")
    score = snapkv.window_score(**{name: inputs[name] for name in names}, shared_heads=True)
    judge.assert_score_right(score, case, shared_heads=True)
    sharded.assert_same_on_all_ranks(score, "score", group)


SIZES = {"batch": 2, "query_heads": 2, "key_value_heads": 1, "head_dim": 16, "dtype": torch.float32}


def new_state(group: Any, side: str, device: str, on_rank_1: dict[str, Any] | None = None) -> Any:
    """A small state. on_rank_1: what differs on rank 1."""
    given = {"budget": 4, **SIZES, "device": device, **((on_rank_1 or {}) if group.rank() == 1 else {})}
    return method(side).LongFlowState(LongFlowConfig(budget=given.pop("budget")), process_group=group, **given)


def constructs(group: Any, side: str, device: str, on_rank_1: dict[str, Any]) -> str | None:
    """What the constructor says on this rank."""
    try:
        new_state(group, side, device, on_rank_1)
    except ValueError as error:
        return str(error)
    return None


def prompts_that_differ(group: Any, side: str, device: str, on_rank_1: dict[str, Any]) -> list[str]:
    """What prefill and compress say on this rank if a prompt differs on rank 1, and whether a state is as before."""
    given = {"tokens": 9, "padding": 0, "budget": 4, **(on_rank_1 if group.rank() == 1 else {})}
    tokens = given["tokens"]
    query, key = (torch.ones(2, heads, tokens, 16, device=device) for heads in (2, 1))
    occupied = (torch.arange(tokens, device=device) >= given["padding"]).expand(2, -1).contiguous()
    state, said = new_state(group, side, device), []
    compress = importlib.import_module(f"kvtwin.{side}.baselines.snapkv").compress
    shared = {"occupied": occupied, "shared_heads": True, "process_group": group}
    for call in (
        lambda: state.prefill(query, key, key, occupied),
        lambda: compress(query[:, :, -2:], key, key, given["budget"], **shared),
    ):
        try:
            call()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    if said[0]:
        token = [torch.ones(2, heads, 16, device=device) for heads in (2, 1, 1)]
        assert_same(state.step(*token), new_state(group, side, device).step(*token), what="output after the error")
    return said


def copies(group: Any, side: str, device: str) -> None:
    """A copy of a state goes on by itself, with the same ranks."""
    state = new_state(group, side, device)
    generator = torch.Generator().manual_seed(group.rank())
    tokens = [
        [torch.randn(2, heads, 16, generator=generator).to(device) for heads in (2, 1, 1)] for _ in range(12)
    ]
    for token in tokens[:6]:
        state.step(*token)
    copied = copy.deepcopy(state)
    outputs = [one.step(*token) for one in (state, copied) for token in tokens[6:]]
    for one, other in zip(outputs[:6], outputs[6:], strict=True):
        assert_same(one, other, what="output of the copy")


def interrupted(group: Any, side: str, device: str) -> str:
    """Let a step fail where the ranks meet, on all of them. Returns what the state says of another step. After a reset
    it steps as a new state does."""
    states = [new_state(group, side, device) for _ in range(2)]
    token = [torch.ones(2, heads, 16, device=device) for heads in (2, 1, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, {"optimized": "all_gather", "reference": "all_gather_object"}[side], fails)
        with pytest.raises(ConnectionError):
            states[0].step(*token)
    with pytest.raises(RuntimeError) as said:
        states[0].step(*token)
    states[0].reset()
    assert_same(states[0].step(*token), states[1].step(*token), what="output after reset")
    return str(said.value)


def fails(*_: Any, **__: Any) -> None:
    raise ConnectionError("a rank is gone")


def keeps_step_in_a_part(group: Any, side: str, trace: StateTrace, members: list[int]) -> None:
    """`keeps_step` on a process group of some of the ranks. The others wait for its end."""
    part = torch.distributed.new_group(members)
    if group.rank() in members:
        keeps_step(part, side, trace)
    torch.distributed.barrier(group)
