"""KeyDiff over pages: the same results as over slots in one tensor, wherever the pages lie:
what only our own sides promise.
"""

from __future__ import annotations

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
from kvtwin.conformance.suite.keydiff.test_keydiff_pages import each_side, evicted, pages_of
from kvtwin.reference.contract import Pages

pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered"), pytest.mark.first]

some = settings(max_examples=max(at_least(2), settings().max_examples // 4))
OWN = {"anchor": ANCHORS[:1], "similarity": SIMILARITIES[:1]}
DECIDED = tuple(content for content in CONTENTS if content not in UNDECIDED)


def scored(module: Any):
    """`paged_score` of a view's case."""
    return lambda view: module.paged_score(
        pages_of(view), view.occupied, anchor=view.case.anchor, similarity=view.case.similarity
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
