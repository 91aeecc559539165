"""KeyDiff over pages: the same results as over slots in one tensor, wherever the pages lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.key_cases import ANCHORS, CONTENTS, SIMILARITIES, UNDECIDED, KeyCase, key_cases
from kvtwin.conformance.cases.paged_states import OWN_LAYOUTS, filled_pages, move
from kvtwin.conformance.cases.paged_view import LAYOUTS, PagedLayout, PagedView
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.judge.pages import judge_paged
from kvtwin.reference.contract import Pages

# See test_keydiff.py.
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered"), pytest.mark.first]

SIDES = ("optimized", "reference")
each_side = pytest.mark.parametrize("side", SIDES)
some = settings(max_examples=max(at_least(2), settings().max_examples // 4))
few = settings(max_examples=max(2, settings().max_examples // 6))
OWN = {"anchor": ANCHORS[:1], "similarity": SIMILARITIES[:1]}
DECIDED = tuple(content for content in CONTENTS if content not in UNDECIDED)


def pages_of(view: PagedView) -> Pages:
    caches = (view.key_cache, view.value_cache)
    if view.layout.order == "heads_first":
        caches = tuple(cache.transpose(1, 2) for cache in caches)
    return Pages(*caches, view.block_table)


def scored(module: Any):
    """`paged_score` of a view's case."""
    return lambda view: module.paged_score(
        pages_of(view), view.occupied, anchor=view.case.anchor, similarity=view.case.similarity
    )


def evicted(module: Any):
    """`paged_evict` of a view's case."""
    return lambda view: module.paged_evict(
        pages_of(view), view.occupied, view.case.budget, recent=view.case.recent, protected=view.protected,
        anchor=view.case.anchor, similarity=view.case.similarity,
    )


def judge_both(case: KeyCase, module: Any) -> None:
    for function in (scored, evicted):
        assert len(judge_paged(case, function(module))) == len(LAYOUTS)


@pytest.mark.kind("equivalence")
@each_side
@given(data=st.data())
@some
def test_keydiff_over_pages_is_right_in_every_layout(side, data, twins):
    """Pages of free slots alone (-1), NaN in all unused memory; the same bits in every layout."""
    judge_both(data.draw(key_cases(content=DECIDED, layout=("contiguous",), **OWN)), getattr(twins, side).keydiff)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_keydiff_over_pages_supports_other_anchors_and_similarities(similarity, side, twins, device):
    case = KeyCase(
        batch=2, key_value_heads=2, slots=20, budget=9, recent=2, occupancy="random", per_head=True, anchor="median",
        similarity=similarity, device=device.type,
    )
    judge_both(case, getattr(twins, side).keydiff)


@pytest.mark.kind("equivalence")
@each_side
def test_keydiff_over_shared_pages_is_right(side, twins, device):
    """Two rows share a page, and a third has another page for the same slots."""
    generator = torch.Generator().manual_seed(5)
    key = torch.randn(3, 1, 20, 16, generator=generator).to(device)
    key[1, :, :16] = key[0, :, :16]
    case, layouts = KeyCase.of(key, budget=8), [PagedLayout(16), PagedLayout(16, shared=True)]
    table = PagedView(case, layouts[1]).block_table
    assert table[0, 0] == table[1, 0] != table[2, 0]
    for function in (scored, evicted):
        judge_paged(case, function(getattr(twins, side).keydiff), layouts)


@pytest.mark.kind("laws")
@each_side
@given(data=st.data())
@some
def test_keydiff_over_pages_has_the_bits_of_one_tensor(side, data, twins, device):
    """On a GPU, where other instructions load the keys, the results are right, and need not have the same bits."""
    case = data.draw(key_cases(layout=["contiguous"], **OWN))
    layout = data.draw(st.sampled_from(OWN_LAYOUTS))
    module, pages = getattr(twins, side).keydiff, filled_pages(layout, case.key, case.value)
    occupied = case.mask[:, 0] if case.occupied is None else case.occupied
    score = module.paged_score(pages, occupied)
    found = module.paged_evict(pages, occupied, case.budget, recent=case.recent, protected=case.protected)
    judge.assert_score_right(score, case)
    judge.assert_kept_right(found.kept, case)
    if device.type == "cpu":
        assert_same(score, module.score(case.key, occupied=occupied), what="score")
        assert_same(found.kept, module.evict(**case.inputs).kept, what="kept")


@pytest.mark.kind("laws")
@each_side
def test_keydiff_does_not_notice_that_pages_move(side, twins, device):
    module, case = getattr(twins, side).keydiff, KeyCase(batch=2, key_value_heads=2, slots=40, device=device.type)
    pages, occupied = filled_pages(PagedLayout(4), case.key, case.value), case.mask
    first = module.paged_score(pages, occupied), *module.paged_evict(pages, occupied, 23)
    before = pages.block_table.clone()
    move(pages, seed=3)
    assert not torch.equal(pages.block_table, before)
    second = module.paged_score(pages, occupied), *module.paged_evict(pages, occupied, 23)
    for name, one, other in zip(("score", "kept", "occupied", "slot"), first, second, strict=True):
        assert_same(other, one, what=name)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("page_size", [5, 64])
@pytest.mark.parametrize("factor", [1e30, 2.0**-71])
def test_a_key_of_extreme_size_in_any_tile_of_pages_has_a_direction(factor, page_size, side, twins, device):
    """Several tiles in a page, and several pages in a tile."""
    key = torch.randn(1, 3, 150, 16, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    for head, place in enumerate((5, 70, 140)):
        key[0, head, place] *= factor
    case = KeyCase.of(key.to(device), budget=100)
    layouts = [PagedLayout(page_size, seed=seed) for seed in (0, 1)]
    for function in (scored, evicted):
        judge_paged(case, function(getattr(twins, side).keydiff), layouts)


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


def write(pages: Pages, slot: Tensor, key: Tensor) -> None:
    """Write keys [B, Hkv, D] into `slot` [B, Hkv], through the block table."""
    for row, slots in enumerate(slot.tolist()):
        for head, place in enumerate(slots):
            page = pages.block_table[row, place // pages.page_size]
            pages.key_cache[page, place % pages.page_size, head] = key[row, head]


@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_token_of_a_step_takes_the_freed_slot(page_size, side, twins, device):
    """As an engine decodes: the new token takes the lowest free slot of each KV head, and one token leaves."""
    module, budget = getattr(twins, side).keydiff, 9
    key = torch.randn(2, 2, budget + 1, 16, generator=torch.Generator().manual_seed(2)).to(device)
    pages = filled_pages(PagedLayout(page_size, "heads_first"), key, key.clone())
    occupied = torch.ones(2, 2, budget + 1, dtype=torch.bool, device=device)
    for step in range(4):
        case = KeyCase.of(key, budget=budget, recent=0)
        found = module.paged_evict(pages, occupied, budget)
        judge.assert_kept_right(found.kept, case)
        assert_same(found.occupied.sum(-1), torch.full((2, 2), budget, device=device), what="tokens")
        assert not found.occupied.gather(-1, found.slot[..., None]).any()
        new = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(10 + step)).to(device)
        write(pages, found.slot, new)
        place = found.slot[..., None, None].expand(-1, -1, 1, 16)
        key = key.scatter(2, place, new[:, :, None])


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


@pytest.mark.limits
@pytest.mark.parametrize(("more", "error", "says"), [
    ({"dtype": torch.float64}, TypeError, "key_cache.dtype must be one of torch.float32, torch.float16"),
    ({"head_dim": 8}, ValueError, "head_dim must be from 16 to 256"),
    ({"grad": True}, ValueError, "key_cache requires grad"),
], ids=["float64", "head_dim", "grad"])
def test_what_kernels_cannot_take_is_refused(more, error, says, twins, device):
    key = torch.zeros(2, 2, 8, more.get("head_dim", 16), dtype=more.get("dtype", torch.float32), device=device)
    pages = filled_pages(PagedLayout(4), key, key.clone())
    pages.key_cache.requires_grad_(more.get("grad", False))
    occupied = torch.zeros(2, 8, dtype=torch.bool, device=device)
    for call in (twins.optimized.keydiff.paged_score, lambda *given: twins.optimized.keydiff.paged_evict(*given, 3)):
        with pytest.raises(error, match=says):
            call(pages, occupied)


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
