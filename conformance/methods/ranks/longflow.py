"""What the tests of LongFlow run on each rank, besides those of all states."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...cases.case import WindowCase
from ...cases.paged_states import module_of
from ...cases.paged_view import PagedLayout
from ...cases.state_trace import StateTrace
from ...judge import lockstep
from ...judge.checkers import snapkv as judge
from . import sharded
from .states import here


def method(side: str) -> Any:
    return importlib.import_module(f"kvtwin.{side}.longflow")


def keeps_step_over_pages(group: Any, side: str, trace: StateTrace) -> None:
    """`states.keeps_step`, with the tokens of each rank in pages of its own."""
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


def prompts_that_differ(group: Any, side: str, device: str, on_rank_1: dict[str, Any]) -> str:
    """What SnapKV's compress says on this rank if a prompt or the budget differs on rank 1."""
    given = {"tokens": 9, "padding": 0, "budget": 4, **(on_rank_1 if group.rank() == 1 else {})}
    tokens = given["tokens"]
    query, key = (torch.ones(2, heads, tokens, 16, device=device) for heads in (2, 1))
    occupied = (torch.arange(tokens, device=device) >= given["padding"]).expand(2, -1).contiguous()
    compress = importlib.import_module(f"kvtwin.{side}.baselines.snapkv").compress
    try:
        compress(
            query[:, :, -2:], key, key, given["budget"], occupied=occupied, shared_heads=True, process_group=group
        )
    except ValueError as error:
        return str(error)
    return ""
