"""KeyDiff over pages: the same results as over slots in one tensor, wherever the pages lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import settings

from kvtwin.conformance.cases.key_cases import KeyCase
from kvtwin.conformance.cases.paged_states import filled_pages
from kvtwin.conformance.cases.paged_view import PagedLayout, PagedView
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference.contract import Pages

# See test_keydiff.py.
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered"), pytest.mark.first]

SIDES = ("optimized", "reference")
each_side = pytest.mark.parametrize("side", SIDES)
few = settings(max_examples=max(2, settings().max_examples // 6))


def pages_of(view: PagedView) -> Pages:
    caches = (view.key_cache, view.value_cache)
    if view.layout.order == "heads_first":
        caches = tuple(cache.transpose(1, 2) for cache in caches)
    return Pages(*caches, view.block_table)


def evicted(module: Any):
    """`paged_evict` of a view's case."""
    return lambda view: module.paged_evict(
        pages_of(view), view.occupied, view.case.budget, recent=view.case.recent, protected=view.protected,
        anchor=view.case.anchor, similarity=view.case.similarity,
    )


@pytest.mark.property("layouts")
@pytest.mark.kind("laws")
@each_side
@pytest.mark.parametrize("transposed", [False, True], ids=["wide", "transposed"])
def test_pages_and_block_tables_may_have_any_strides(transposed, side, twins, device):
    """Channels that are not contiguous, further columns of the block table that are no pages, and a mask per head."""
    module, case = getattr(twins, side).keydiff, KeyCase(
        batch=2, key_value_heads=2, slots=22, budget=9, occupancy="random", per_head=True, device=device.type,
    )
    pages = filled_pages(PagedLayout(5), case.key, case.value)
    wide = torch.nn.functional.pad(pages.block_table, (0, 2), value=99)
    other = Pages(
        pages.key_cache.transpose(1, 3).contiguous().transpose(1, 3), pages.value_cache,
        wide.t().contiguous().t() if transposed else wide,
    )
    assert other.key_cache.stride(3) != 1
    judge.assert_score_right(module.paged_score(other, case.occupied), case)
    judge.assert_kept_right(module.paged_evict(other, case.occupied, 9).kept, case)


# A decode step -------------------------------------------------------------------------------------------------------


@pytest.mark.property("free_slots")
@pytest.mark.kind("laws")
@each_side
def test_a_full_cache_has_no_free_slot(side, twins, device):
    key = torch.ones(1, 2, 6, 16, device=device)
    pages = filled_pages(PagedLayout(4), key, key.clone())
    occupied = torch.ones(1, 2, 6, dtype=torch.bool, device=device)
    occupied[0, 1, 3] = False
    found = getattr(twins, side).keydiff.paged_evict(pages, occupied, 8)
    assert found.slot.tolist() == [[-1, 3]]
    assert_same(found.occupied, occupied, what="occupied")
    assert found.kept[0, 1].tolist() == [0, 1, 2, 4, 5, -1]


# Bad input -----------------------------------------------------------------------------------------------------------

TABLE = r"pages.block_table must"
#: What is changed: fields of the pages, or arguments.
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no pages": (lambda a: {"pages": tuple(a["pages"])}, TypeError, "pages must be Pages, got tuple"),
    "a list of keys": (lambda a: {"key_cache": [1]}, TypeError, "pages.key_cache must be a torch.Tensor"),
    "keys of one page": (
        lambda a: {"key_cache": a["pages"].key_cache[0]}, ValueError, r"pages.key_cache must be \[pages, page_size"
    ),
    "integers": (
        lambda a: {"key_cache": a["pages"].key_cache.long()}, TypeError, "pages.key_cache.dtype must be one of"
    ),
    "other values": (
        lambda a: {"value_cache": a["pages"].value_cache[:, :2]}, ValueError, "pages.value_cache must be key_cache's"
    ),
    "a table of int64": (
        lambda a: {"block_table": a["pages"].block_table.long()}, TypeError, f"{TABLE} be int32, got torch.int64"
    ),
    "a table of one row": (
        lambda a: {"block_table": a["pages"].block_table[0]}, ValueError, rf"{TABLE} be \[B, n\]"
    ),
    "a table on another device": (
        lambda a: {"block_table": a["pages"].block_table.to("meta")}, ValueError, f"{TABLE} be on .* like key_cache"
    ),
    "other rows": (
        lambda a: {"block_table": a["pages"].block_table[:1]}, ValueError, r"occupied must be \[B, S\].*\(1, 19\)"
    ),
    "a page outside": (
        lambda a: {"block_table": a["pages"].block_table + 1}, ValueError, f"{TABLE} be from 0 to 12, or -1 for none"
    ),
    "no page for a token": (
        lambda a: {"block_table": a["pages"].block_table.index_fill(1, torch.tensor([1], device=a["device"]), -1)},
        ValueError, f"{TABLE} have a page for each occupied slot, got -1 in row 0, column 1",
    ),
    "too many slots": (
        lambda a: {"occupied": torch.ones(2, 21, dtype=torch.bool, device=a["device"])}, ValueError,
        r"occupied must be \[B, S\] with S <= 20, the slots of 5 pages of 4, got \(2, 21\)",
    ),
    "other heads": (
        lambda a: {"occupied": torch.ones(2, 3, 19, dtype=torch.bool, device=a["device"])}, ValueError,
        r"occupied must be \[B, Hkv, S\].*\(2, 3, 19\)",
    ),
    "no mask": (lambda a: {"occupied": None}, TypeError, "occupied must be a torch.Tensor"),
    "a mask of numbers": (
        lambda a: {"occupied": a["occupied"].int()}, TypeError, "occupied must have dtype torch.bool"
    ),
    "a flag": (lambda a: {"check_entries": 1}, TypeError, "check_entries must be a bool"),
    "an anchor": (lambda a: {"anchor": "mode"}, ValueError, "anchor must be one of"),
    "a similarity": (lambda a: {"similarity": "angle"}, ValueError, "similarity must be one of"),
    "a budget": (lambda a: {"budget": 0}, ValueError, "budget must be at least 1, got 0"),
    "recent": (lambda a: {"recent": 5}, ValueError, "recent must be at most budget = 4, got 5"),
    "protected of another shape": (
        lambda a: {"protected": a["occupied"][:, :18]}, ValueError, r"protected must be \[B, S\].*\(2, 18\)"
    ),
    "more protected than the budget": (
        lambda a: {"protected": a["occupied"]}, ValueError, "protected must mark at most budget = 4 tokens"
    ),
}
OF_EVICT = ("budget", "recent", "protected")


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize(("change", "error", "says"), BAD.values(), ids=list(BAD))
def test_wrong_calls_over_pages_are_refused(side, change, error, says, twins, device):
    key = torch.zeros(2, 2, 19, 16, device=device)
    pages = filled_pages(PagedLayout(4), key, key.clone())
    occupied = torch.ones(2, 19, dtype=torch.bool, device=device)
    given: dict[str, Any] = {"pages": pages, "occupied": occupied, "budget": 4, "check_entries": True}
    for name, value in change({**given, "device": device}).items():
        if name in pages._fields:
            given["pages"] = pages._replace(**{name: value})
        else:
            given[name] = value
    module = getattr(twins, side).keydiff
    with pytest.raises(error, match=says):
        module.paged_evict(**given)
    if not given.keys() & set(OF_EVICT[1:]) and given.pop("budget") == 4:
        with pytest.raises(error, match=says):
            module.paged_score(**given)


@pytest.mark.property("free_slots")
@pytest.mark.kind("laws")
@each_side
def test_a_row_without_tokens_keeps_none(side, twins, device):
    """Its pages are -1, and the cache may have one page only."""
    case = KeyCase(batch=2, key_value_heads=1, slots=7, budget=3, occupancy="empty_row", device=device.type)
    view = PagedView(dataclasses.replace(case, poison="nan"), PagedLayout(16, spare=0))
    empty = ~view.occupied.any(1)
    assert bool((view.block_table[empty] == -1).all())
    found = evicted(getattr(twins, side).keydiff)(view)
    assert bool((found.kept[empty] == -1).all())
    assert bool((found.slot[empty] == 0).all())
