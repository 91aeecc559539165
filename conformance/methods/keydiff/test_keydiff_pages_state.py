"""KeyDiff's state over pages: the same tokens, outputs and evictions as in tensors of its own, wherever pages lie:
what only our own sides promise.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases.paged_states import (
    OWN_LAYOUTS,
    assert_only_own_slots_were_written,
    empty_pages,
    move,
    name_of,
)
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.cases.strategies import state_traces
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.keydiff.test_keydiff_pages_state import BUDGET, MORE, SIZES, each_side, over_pages
from kvtwin.reference.contract import Pages

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

few = settings(max_examples=max(2, settings().max_examples // 5))
each_layout = pytest.mark.parametrize("layout", OWN_LAYOUTS, ids=name_of)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_side
@each_layout
@given(data=st.data())
@few
def test_keydiff_state_over_pages_keeps_step_with_float64(side, layout, data, twins):
    trace = data.draw(state_traces("keydiff"))
    reorder_at, reset_at = (data.draw(st.sampled_from((-1, trace.steps // 2))) for _ in range(2))
    trace = dataclasses.replace(trace, reorder_at=reorder_at, reset_at=reset_at)
    paged = over_pages(getattr(twins, side).keydiff, layout)
    lockstep.run(trace, paged)
    (state,) = paged.made
    assert_only_own_slots_were_written(state.pages, state.config.budget + MORE)


def tokens(number: int, count: int | None = None) -> list[Tensor]:
    """Query, key and value of a token, or of `count` tokens, that depend on `number` alone."""
    generator = torch.Generator().manual_seed(number)
    shape = () if count is None else (count,)
    return [torch.randn(2, heads, *shape, 16, generator=generator) for heads in (4, 2, 2)]


def fed(state: Any, steps: int, *, first: int = 0) -> list[Tensor]:
    """The outputs of steps."""
    return [
        state.step(*(tensor.to(state.device) for tensor in tokens(number))) for number in range(first, first + steps)
    ]


def new(side: str, twins: Any, device: torch.device, layout: PagedLayout | None, **more: Any) -> Any:
    keydiff = getattr(twins, side).keydiff
    made = keydiff if layout is None else over_pages(keydiff, layout)
    config = keydiff.KeyDiffConfig(budget=BUDGET, **{"block_size": 8, "refresh": 5, **more})
    return made.KeyDiffState(config, **SIZES, device=device)


def assert_alike(one: Any, other: Any, *, bits: bool) -> None:
    """The same tokens in the same slots, with the same bits."""
    names = ("positions", "occupied", *(("key", "value", "score") if bits else ()))
    hidden = ~one.occupied
    for name in names:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name in ("key", "value"):
            mine, theirs = (tensor.masked_fill(hidden[..., None], 0) for tensor in (mine, theirs))
        assert_same(mine, theirs, what=name)


@pytest.mark.kind("laws")
@each_side
@pytest.mark.parametrize("layout", [
    PagedLayout(4, "heads_first", joined=True),
    pytest.param(PagedLayout(16, apart=True), marks=pytest.mark.slow_on_cpu),
], ids=name_of)
def test_a_state_over_pages_has_the_bits_of_one_with_tensors_of_its_own(side, layout, twins, device):
    """A prompt of two blocks, steps, and a block between them. On a GPU, where other instructions load the tokens,
    outputs are not compared."""
    paged, plain = (new(side, twins, device, one) for one in (layout, None))
    prompt = [tensor.to(device) for tensor in tokens(100, 12)]
    block = [tensor[:, :, :3] for tensor in prompt]
    outputs = [[state.prefill(*prompt), *fed(state, 3), state.append_block(*block)] for state in (paged, plain)]
    for state in (paged, plain):
        outputs.append(fed(state, 2, first=3))
    if device.type == "cpu":
        for one, other in zip(outputs[0] + outputs[2], outputs[1] + outputs[3], strict=True):
            assert_same(one, other, what="output")
        assert_alike(paged, plain, bits=True)
    assert_only_own_slots_were_written(paged.pages, BUDGET + MORE)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
def test_other_anchors_over_pages_have_the_bits_of_one_tensor(side, twins, device):
    options = {"anchor": "mean", "similarity": "dot"}
    paged, plain = (new(side, twins, device, layout, **options) for layout in (PagedLayout(4), None))
    for one, other in zip(fed(paged, BUDGET + 4), fed(plain, BUDGET + 4), strict=True):
        assert_same(one, other, what="output")
    assert_alike(paged, plain, bits=True)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
def test_keydiff_state_does_not_notice_that_pages_move(side, twins, device):
    still, moved = (new(side, twins, device, PagedLayout(4, spare=2)) for _ in range(2))
    for first in (0, 12):
        for one, other in zip(fed(still, 12, first=first), fed(moved, 12, first=first), strict=True):
            assert_same(one, other, what="output")
        move(moved.pages, seed=first)
    for one, other in zip(fed(still, 2, first=24), fed(moved, 2, first=24), strict=True):
        assert_same(one, other, what="output")
    assert_alike(moved, still, bits=True)


@pytest.mark.kind("laws")
@each_side
def test_tokens_of_a_state_are_in_its_pages(side, twins, device):
    """`score` of the tokens in the pages, after a step, is that of the function over them."""
    state = new(side, twins, device, PagedLayout(4))
    fed(state, BUDGET + 2)
    pages, size = state.pages, state.pages.page_size
    for row, head in ((0, 1), (1, 0)):
        for slot in range(BUDGET):
            page = pages.block_table[row, slot // size]
            assert_same(pages.key_cache[page, slot % size, head], state.key[row, head, slot], what="key")
    kept = state.occupied[..., :BUDGET]
    found = getattr(twins, side).keydiff.paged_score(pages, kept)
    assert_same(found, getattr(twins, side).keydiff.score(state.key[:, :, :BUDGET], occupied=kept), what="score")


@pytest.mark.kind("laws")
def test_a_step_over_pages_copies_no_cache(twins, device, monkeypatch):
    state = new("optimized", twins, device, PagedLayout(4))
    over_pages(twins.optimized.keydiff, PagedLayout(4))
    module = inspect.getmodule(type(state))
    for name in ("read_slots", "write_slots"):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a step copied the cache"), raising=False)
    fed(state, 2)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
def test_rows_of_keydiff_pages_are_reordered_and_reset(side, twins, device):
    """As in tensors of the state's own."""
    paged, plain = (new(side, twins, device, layout, recent=2) for layout in (PagedLayout(4, seed=1), None))
    index = torch.tensor([1, 1], device=device)
    for state in (paged, plain):
        fed(state, 25)
        state.reorder(index)
        fed(state, 5, first=25)
    assert_alike(paged, plain, bits=device.type == "cpu")
    paged.reset()
    assert not paged.occupied.any()
    fed(paged, 1)
    assert paged.positions[:, :, 0].flatten().tolist() == [0] * 4


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
def test_copies_of_a_keydiff_state_have_pages_of_their_own(side, twins, device):
    state = new(side, twins, device, PagedLayout(4, "heads_first", joined=True))
    fed(state, 25)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    before = state.key
    outputs = [fed(one, 4, first=25) for one in copies]
    assert_same(state.key, before, what="key of the original")
    for other in outputs:
        for one, two in zip(fed(copy.deepcopy(state), 4, first=25), other, strict=True):
            assert_same(one, two, what="output")


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
@pytest.mark.parametrize("transposed", [False, True], ids=["wide", "transposed"])
def test_keydiff_pages_of_any_strides_hold_what_one_tensor_does(side, transposed, twins, device):
    """Keys and values with other strides, channels that are not contiguous, and further columns of the table."""
    keydiff = getattr(twins, side).keydiff
    over_pages(keydiff, PagedLayout(4))
    sizes = {name: value for name, value in SIZES.items() if name != "query_heads"}
    key, _, table = empty_pages(PagedLayout(4), slots=BUDGET + MORE, **sizes, device=device)
    _, value, _ = empty_pages(PagedLayout(4, "heads_first", apart=True), slots=BUDGET + MORE, **sizes, device=device)
    wide = torch.cat((table, torch.full_like(table, -1)), 1)
    key = key.transpose(1, 3).contiguous().transpose(1, 3)
    pages = Pages(key, value, wide.t().contiguous().t() if transposed else wide)
    config = keydiff.KeyDiffConfig(budget=BUDGET, block_size=8)
    paged = keydiff.KeyDiffState(config, **SIZES, device=device, pages=pages)
    plain = keydiff.KeyDiffState(config, **SIZES, device=device)
    outputs = [fed(state, BUDGET + 4) for state in (paged, plain)]
    if device.type == "cpu":
        for one, other in zip(*outputs, strict=True):
            assert_same(one, other, what="output")
    assert_alike(paged, plain, bits=device.type == "cpu")
