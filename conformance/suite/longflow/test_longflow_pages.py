"""LongFlow over pages: the same results as over slots in one tensor, wherever the pages lie."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.paged_states import (
    OWN_LAYOUTS,
    empty_pages,
    filled_pages,
    module_of,
    name_of,
)
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.refusals import NotProvided
from kvtwin.reference.contract import Pages

pytestmark = pytest.mark.first

SIDES = ("optimized", "reference")
each_side = pytest.mark.parametrize("side", SIDES)


def over_pages(longflow: Any, layout: PagedLayout) -> Any:
    if "pages" not in inspect.signature(longflow.LongFlowState).parameters:
        raise NotProvided(f"{longflow}.LongFlowState: pages")
    return module_of(longflow, "LongFlowState", layout)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("layout", [
    pytest.param(layout, id=name_of(layout), marks=pytest.mark.property("state") if number in (0, 4) else ())
    for number, layout in enumerate(OWN_LAYOUTS)
])
def test_longflow_state_over_many_pages_keeps_step_with_float64(side, layout, twins, device):
    """Several pages of each size, several tiles in a page, and new tokens in any of them."""
    trace = StateTrace(
        method="longflow", config=(("budget", 150), ("sinks", 3)), prompt=200, steps=8, batch=2, key_value_heads=2,
        group=2, seed=5, device=device.type,
    )
    lockstep.run(trace, over_pages(getattr(twins, side).longflow, layout))


SIZES = {"batch": 2, "query_heads": 4, "key_value_heads": 2, "head_dim": 16, "dtype": torch.float32}


@pytest.mark.kind("bad_input")
@each_side
def test_numbers_that_are_not_finite_are_refused_in_occupied_slots_alone(side, twins, device):
    key = torch.zeros(2, 2, 8, 16, device=device)
    occupied = torch.arange(8, device=device).expand(2, -1) < 6
    decode = getattr(twins, side).longflow.paged_decode_attention
    query = torch.zeros(2, 4, 16, device=device)
    for slot in (7, 5):
        for name in ("key", "value"):
            tensors = {"key": key, "value": key.clone()}
            tensors[name] = tensors[name].clone()
            tensors[name][1, 0, slot, 3] = torch.nan
            pages = filled_pages(PagedLayout(4), **tensors)
            if slot == 7:
                decode(query, pages, occupied, check_finite=True)
            else:
                with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
                    decode(query, pages, occupied, check_finite=True)


def changed(pages: Pages, **more) -> Pages:
    return pages._replace(**more)


BAD_PAGES = {
    "no pages": (tuple, TypeError, "pages must be Pages, got tuple"),
    "a short table": (
        lambda p: changed(p, block_table=p.block_table[:, :4]), ValueError,
        r"pages.block_table must be \[B, n\] with B = 2 and n >= 5 for 19 slots in pages of 4, got \(2, 4\)",
    ),
    "other rows": (lambda p: changed(p, block_table=p.block_table[:1]), ValueError, r"with B = 2 and n >= 5"),
    "a page twice": (
        lambda p: changed(p, block_table=p.block_table[:1].expand(2, -1).contiguous()), ValueError,
        "must have a page for one row only",
    ),
    "no page": (
        lambda p: changed(p, block_table=torch.where(p.block_table == p.block_table[1, 4], -1, p.block_table)),
        ValueError, "pages.block_table must have pages from 0 to 12 in its first 5 columns, got -1 to",
    ),
    "a page outside": (
        lambda p: changed(p, block_table=p.block_table + 1), ValueError, "must have pages from 0 to 12 .* to 13"
    ),
    "a table of int64": (
        lambda p: changed(p, block_table=p.block_table.long()), TypeError, "pages.block_table must be int32"
    ),
    "heads first": (
        lambda p: changed(p, key_cache=p.key_cache.transpose(1, 2), value_cache=p.value_cache.transpose(1, 2)),
        ValueError, r"with the state's Hkv = 2 and D = 16, got \(13, 2, 4, 16\)",
    ),
    "other values": (
        lambda p: changed(p, value_cache=p.value_cache[:, :2]), ValueError, "pages.value_cache must be key_cache's"
    ),
    "another dtype": (
        lambda p: changed(p, key_cache=p.key_cache.half(), value_cache=p.value_cache.half()), TypeError,
        "pages.key_cache must have the state's dtype torch.float32, got torch.float16",
    ),
    "another dtype of values": (
        lambda p: changed(p, value_cache=p.value_cache.half()), TypeError,
        "pages.value_cache must have key_cache's dtype",
    ),
    "values twice": (
        lambda p: changed(p, value_cache=p.value_cache[:1].expand(13, -1, -1, -1)), ValueError,
        "pages.value_cache must have memory for each element",
    ),
    "keys twice": (
        lambda p: changed(p, key_cache=p.key_cache[:1].expand(13, -1, -1, -1)), ValueError,
        "pages.key_cache must have memory for each element",
    ),
    "pages that overlap": (
        lambda p: changed(p, value_cache=p.value_cache.as_strided((13, 4, 2, 16), (64, 32, 16, 1))), ValueError,
        "pages.value_cache must have memory for each element",
    ),
    "keys as values": (
        lambda p: changed(p, value_cache=p.key_cache), ValueError, "pages.value_cache must have memory of its own"
    ),
    "grad": (
        lambda p: changed(p, key_cache=p.key_cache.requires_grad_()), ValueError, "pages.key_cache requires grad"
    ),
}


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize(("change", "error", "says"), BAD_PAGES.values(), ids=list(BAD_PAGES))
def test_wrong_pages_are_refused(side, change, error, says, twins, device):
    longflow = getattr(twins, side).longflow
    over_pages(longflow, PagedLayout(4))                # not provided unless the state takes pages
    pages = empty_pages(
        PagedLayout(4, seed=3), batch=2, slots=19, key_value_heads=2, head_dim=16, dtype=torch.float32, device=device
    )
    with pytest.raises(error, match=says):
        longflow.LongFlowState(longflow.LongFlowConfig(budget=19), **SIZES, device=device, pages=change(pages))


BAD_CALLS = {
    "too many slots": (
        {"occupied": (2, 21)}, ValueError, r"occupied must be \[B, S\] with S <= 20, the slots of 5 pages of 4"
    ),
    "other rows": ({"query": (3, 4, 16)}, ValueError, "with block_table's B = 2 and key_cache's D = 16"),
    "another head_dim": ({"query": (2, 4, 32)}, ValueError, "with block_table's B = 2 and key_cache's D = 16"),
    "heads": ({"query": (2, 3, 16)}, ValueError, "query heads must be a multiple"),
    "a mask per head": ({"occupied": (2, 2, 19)}, ValueError, r"occupied must be \[B, S\]"),
    "a page outside": ({"table": 12}, ValueError, "pages.block_table must be from 0 to 12, or -1 for none"),
    "no page for a token": (
        {"table": -13}, ValueError, "must have a page for each occupied slot, got -1 in row 0, column 1"
    ),
    "protected of another shape": ({"protected": (2, 18)}, ValueError, "protected must be"),
    "a flag": ({"per_head": 1}, TypeError, "per_head must be a bool"),
    "another dtype": ({"dtype": torch.float16}, TypeError, "query must have key_cache's dtype torch.float32"),
    "another device of the mask": ({"meta": True}, ValueError, "occupied must be on .* like key_cache"),
}


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize(("change", "error", "says"), BAD_CALLS.values(), ids=list(BAD_CALLS))
def test_wrong_calls_over_pages_are_refused(side, change, error, says, twins, device):
    pages = empty_pages(
        PagedLayout(4), batch=2, slots=19, key_value_heads=2, head_dim=16, dtype=torch.float32, device=device
    )
    given = {
        "query": torch.zeros(change.get("query", (2, 4, 16)), device=device, dtype=change.get("dtype")),
        "occupied": torch.ones(change.get("occupied", (2, 19)), dtype=torch.bool, device=device),
        "per_head": change.get("per_head", False),
    }
    if "table" in change:
        pages.block_table[0, 1] = 13 if change["table"] > 0 else -1
        given["check_finite"] = True
    if "protected" in change:
        given["protected"] = torch.zeros(change["protected"], dtype=torch.bool, device=device)
    if "meta" in change:
        given["occupied"] = given["occupied"].to("meta")
    with pytest.raises(error, match=says):
        getattr(twins, side).longflow.paged_decode_attention(pages=pages, **given)
