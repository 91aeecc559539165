"""Cases in pages: what the block table refers to, what lies in unused memory, and the judge of functions over pages."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvtwin.conformance import api
from kvtwin.conformance.cases.paged_view import LAYOUTS
from kvtwin.reference import keydiff, longflow

CASES = {
    "ragged": api.DecodeCase(batch=3, key_value_heads=2, group=2, slots=70, occupancy="random", dtype=torch.float16),
    "full": api.DecodeCase(batch=2, slots=16, dtype=torch.bfloat16),
    "equal rows": api.DecodeCase(batch=3, slots=40, layout="repeat_rows"),
    "an empty row": api.DecodeCase(batch=2, slots=33, occupancy="empty_row"),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def at(view: api.PagedView, cache: torch.Tensor, row: int, slot: int) -> torch.Tensor:
    """The token [Hkv, D] of a slot, through the block table."""
    page, place = view.block_table[row, slot // view.layout.page_size], slot % view.layout.page_size
    return cache[page, place] if view.layout.order == "tokens_first" else cache[page, :, place]


def gathered(view: api.PagedView) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, Hkv, S, D] of a view, zero in free slots."""
    slots = view.occupied.shape[1]
    found = []
    for cache in (view.key_cache, view.value_cache):
        pages = cache if view.layout.order == "tokens_first" else cache.transpose(1, 2)
        held = pages[view.block_table.long().clamp_min(0)].flatten(1, 2)[:, :slots].transpose(1, 2)
        found.append(held.masked_fill(~view.occupied[:, None, :, None], 0))
    return found[0], found[1]


def over_pages(view: api.PagedView):
    return longflow.decode_attention(view.query, *gathered(view), view.occupied, scale=view.scale)


@cases
@layouts
def test_the_block_table_leads_to_every_token(case, layout):
    view = api.PagedView(case, layout)
    shape = (layout.page_size, case.key_value_heads, case.head_dim)
    shape = shape if layout.order == "tokens_first" else (shape[1], shape[0], shape[2])
    assert view.key_cache.shape[1:] == view.value_cache.shape[1:] == shape
    for row in range(case.batch):
        slots = case.occupied[row].nonzero().flatten().tolist()
        assert int(view.lengths[row]) == (slots[-1] + 1 if slots else 0)
        for slot in slots:
            assert torch.equal(at(view, view.key_cache, row, slot), case.key[row, :, slot])
            assert torch.equal(at(view, view.value_cache, row, slot), case.value[row, :, slot])
            physical = int(view.block_table[row, slot // layout.page_size]) * layout.page_size + slot % layout.page_size
            assert int(view.slot_mapping[row, slot]) == physical
    assert torch.equal(view.slot_mapping < 0, ~case.occupied)


@layouts
@pytest.mark.parametrize("occupancy", ["none", "random"])
def test_the_slots_of_a_key_case_are_those_of_each_head(occupancy, layout):
    case = api.KeyCase(
        batch=2, key_value_heads=2, slots=40, occupancy=occupancy, per_head=True, poison="stale"
    )
    view = api.PagedView(case, layout)
    held = case.mask.any(1)
    assert torch.equal(view.occupied, case.mask[:, 0] if occupancy == "none" else case.mask)
    assert torch.equal(view.slot_mapping >= 0, held)
    for row, slot in held.nonzero().tolist():
        key, token = at(view, view.key_cache, row, slot), case.key[row, :, slot]
        assert torch.equal(key.nan_to_num(7), token.where(case.mask[row, :, slot, None], 7))


@cases
@layouts
def test_unused_memory_holds_nan(case, layout):
    """As many numbers are not NaN as the tokens that the pages hold have."""
    view = api.PagedView(case, layout)
    tokens = len(set(view.slot_mapping[view.slot_mapping >= 0].tolist()))
    for cache in (view.key_cache, view.value_cache):
        assert int((~cache.isnan()).sum()) == tokens * case.key_value_heads * case.head_dim
    if layout.joined:
        assert view.cache is not None
        assert torch.equal(view.cache[:, 0].nan_to_num(), view.key_cache.nan_to_num())
    else:
        assert view.cache is None
    assert view.key_cache.is_contiguous() == (not layout.joined and not layout.apart)


@cases
@layouts
def test_the_form_of_flashinfer_has_the_same_pages(case, layout):
    view = api.PagedView(case, layout)
    for row in range(case.batch):
        start, end = view.page_indptr[row:row + 2].tolist()
        entries = view.page_indices[start:end].tolist()
        assert entries == view.block_table[row, :len(entries)].clamp_min(0).tolist()
        length = max(0, len(entries) - 1) * layout.page_size + int(view.last_page_len[row])
        assert length == int(view.lengths[row])
    assert int(view.page_indptr[-1]) == len(view.page_indices)


def test_equal_pages_are_shared_and_others_are_not():
    table = api.PagedView(CASES["equal rows"], api.PagedLayout(shared=True)).block_table
    assert torch.equal(table[0], table[1])
    assert len(set(table[0].tolist())) == 3
    apart = api.PagedView(CASES["equal rows"], api.PagedLayout()).block_table
    assert len(set(apart.flatten().tolist())) == 9


def test_pages_with_equal_keys_and_other_values_are_not_shared():
    key = torch.ones(2, 1, 16, 16)
    case = api.DecodeCase.of(torch.ones(2, 1, 16), key, torch.stack((key[0], 2 * key[0])))
    assert len(set(api.PagedView(case, api.PagedLayout(shared=True)).block_table.flatten().tolist())) == 2


def test_the_seed_permutes_the_pages():
    one, other = (api.PagedView(CASES["ragged"], api.PagedLayout(seed=seed)).block_table for seed in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(one < 0, other < 0)


@cases
def test_a_right_function_is_right_in_every_layout(case):
    assert len(api.judge_paged(case, over_pages)) == len(LAYOUTS)
    lines = api.judge_paged(case, lambda view: over_pages(view).output)
    assert lines[:2] == ["pages of 16: right", "pages of 16 {'seed': 1}: right"]
    assert lines[2] == "pages of 16 {'order': 'heads_first', 'apart': True}: right"


def reads_free_slots(view):
    size = view.layout.page_size
    pages = view.key_cache if view.layout.order == "tokens_first" else view.key_cache.transpose(1, 2)
    held = pages[view.block_table.long().clamp_min(0)].flatten(1, 2)[:, :view.occupied.shape[1]].transpose(1, 2)
    output, score, slot = over_pages(view)
    return output + 0 * held.sum().to(output.dtype) * size, score, slot


def depends_on_the_order_of_pages(view):
    output, score, slot = over_pages(view)
    return output, torch.where(view.block_table[0, 0] % 2 == 0, score, score * (1 + 2.0**-23)), slot


@pytest.mark.parametrize(("wrong", "says"), [
    (reads_free_slots, "output"),
    (lambda view: over_pages(view).output * 1.01, "output in PagedLayout"),
    (depends_on_the_order_of_pages, "compared with the first layout"),
])
def test_a_wrong_function_is_noticed(wrong, says):
    with pytest.raises(api.Mismatch, match=says):
        api.judge_paged(CASES["ragged"], wrong, [*LAYOUTS, *(api.PagedLayout(seed=seed) for seed in range(2, 8))])


def keys_over_pages(view):
    """KeyDiff's eviction, and its scores."""
    caches = [view.key_cache, view.value_cache]
    if view.layout.order == "heads_first":
        caches = [cache.transpose(1, 2) for cache in caches]
    pages = keydiff.Pages(*caches, view.block_table)
    return keydiff.paged_evict(pages, view.occupied, view.case.budget), keydiff.paged_score(pages, view.occupied)


KEYS = api.KeyCase(batch=2, key_value_heads=2, slots=40, budget=20, occupancy="random")


def test_functions_of_keys_are_judged():
    for number in (0, 1):
        assert len(api.judge_paged(KEYS, lambda view, number=number: keys_over_pages(view)[number])) == len(LAYOUTS)


@pytest.mark.parametrize(("wrong", "says"), [
    (lambda view: keys_over_pages(view)[1] + 0.01, "score"),
    (lambda view: keys_over_pages(view)[0]._replace(kept=keys_over_pages(view)[0].kept.flip(-1)), "kept"),
    (lambda view: keys_over_pages(view)[0]._replace(occupied=view.occupied[:, None].expand(-1, 2, -1)), "occupied in"),
    (lambda view: keys_over_pages(view)[0]._replace(slot=keys_over_pages(view)[0].slot + 1), "slot in"),
    (lambda view: keys_over_pages(view)[1] * (1 + 2.0**-23 * (view.layout.seed > 0)), "compared with the first layout"),
], ids=["score", "order", "occupied", "slot", "bits"])
def test_a_wrong_function_of_keys_is_noticed(wrong, says):
    with pytest.raises((api.Mismatch, AssertionError), match=says):
        api.judge_paged(KEYS, wrong)


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda: api.PagedView(api.DecodeCase(per_head=True)), ValueError, "per_head=False"),
    (lambda: api.PagedView(3), TypeError, "case must be a DecodeCase or a KeyCase, got int"),
    (lambda: api.PagedLayout(0), ValueError, "page_size must be at least 1, got 0"),
    (lambda: api.PagedLayout(spare=-1), ValueError, "spare must be at least 0, got -1"),
    (lambda: api.PagedLayout(True), TypeError, "page_size must be an int, got bool"),
    (lambda: api.PagedLayout(order="NHD"), ValueError, "order must be one of tokens_first, heads_first, got 'NHD'"),
])
def test_wrong_arguments(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_layouts_are_what_the_docs_say():
    assert {layout.page_size for layout in LAYOUTS} == {1, 16, 64}
    for field in ("order", "joined", "apart", "shared", "seed"):
        assert len({getattr(layout, field) for layout in LAYOUTS}) == 2, field
    assert dataclasses.replace(LAYOUTS[0], seed=1) == LAYOUTS[1]
