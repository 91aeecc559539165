"""KeyDiff's state over pages: the same tokens, outputs and evictions as in tensors of its own, wherever pages lie."""

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
    module_of,
    move,
    name_of,
)
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import state_traces
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.refusals import NotProvided
from kvtwin.reference.contract import Pages

# See test_keydiff.py.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

SIDES = ("optimized", "reference")
each_side = pytest.mark.parametrize("side", SIDES)
few = settings(max_examples=max(2, settings().max_examples // 5))
#: The token of a step needs a slot of its own.
MORE = 1
SIZES = {"batch": 2, "query_heads": 4, "key_value_heads": 2, "head_dim": 16, "dtype": torch.float32}
BUDGET = 9
each_layout = pytest.mark.parametrize("layout", OWN_LAYOUTS, ids=name_of)


def over_pages(keydiff: Any, layout: PagedLayout) -> Any:
    if "pages" not in inspect.signature(keydiff.KeyDiffState).parameters:
        raise NotProvided(f"{keydiff}.KeyDiffState: pages")
    return module_of(keydiff, "KeyDiffState", layout, more=MORE)


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


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("layout", [
    pytest.param(layout, id=name_of(layout), marks=pytest.mark.property("state") if number in (0, 4) else ())
    for number, layout in enumerate(OWN_LAYOUTS)
])
def test_keydiff_state_over_many_pages_keeps_step_with_float64(side, layout, twins, device):
    """Several pages of each size, several tiles in a page, and new tokens in any of them."""
    trace = StateTrace(
        method="keydiff", config=(("budget", 150), ("block_size", 200), ("refresh", 3)), prompt=200, steps=8, batch=2,
        key_value_heads=2, group=2, seed=5, device=device.type,
    )
    lockstep.run(trace, over_pages(getattr(twins, side).keydiff, layout))


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


# Bad input -----------------------------------------------------------------------------------------------------------

BAD_PAGES: dict[str, tuple[Any, type[Exception], str]] = {
    "no pages": (tuple, TypeError, "pages must be Pages, got tuple"),
    "no room for the token of a step": (
        lambda p: p._replace(block_table=p.block_table[:, :2]), ValueError,
        r"pages.block_table must be \[B, n\] with B = 2 and n >= 3 for 10 slots in pages of 4, got \(2, 2\)",
    ),
    "a page twice": (
        lambda p: p._replace(block_table=p.block_table[:1].expand(2, -1).contiguous()), ValueError,
        "must have a page for one row only",
    ),
    "a page outside": (
        lambda p: p._replace(block_table=p.block_table + 4), ValueError, r"must have pages from 0 to 8 .* to \d+"
    ),
    "heads first": (
        lambda p: p._replace(key_cache=p.key_cache.transpose(1, 2), value_cache=p.value_cache.transpose(1, 2)),
        ValueError, r"with the state's Hkv = 2 and D = 16, got \(9, 2, 4, 16\)",
    ),
    "another dtype": (
        lambda p: p._replace(key_cache=p.key_cache.half(), value_cache=p.value_cache.half()), TypeError,
        "pages.key_cache must have the state's dtype torch.float32, got torch.float16",
    ),
    "keys as values": (
        lambda p: p._replace(value_cache=p.key_cache), ValueError, "pages.value_cache must have memory of its own"
    ),
}


@pytest.mark.kind("bad_input")
@each_side
@pytest.mark.parametrize(("change", "error", "says"), BAD_PAGES.values(), ids=list(BAD_PAGES))
def test_wrong_pages_of_a_keydiff_state_are_refused(side, change, error, says, twins, device):
    keydiff = getattr(twins, side).keydiff
    over_pages(keydiff, PagedLayout(4))                 # not provided unless the state takes pages
    sizes = {name: value for name, value in SIZES.items() if name != "query_heads"}
    pages = empty_pages(PagedLayout(4, seed=3), slots=BUDGET + MORE, **sizes, device=device)
    with pytest.raises(error, match=says):
        keydiff.KeyDiffState(keydiff.KeyDiffConfig(budget=BUDGET), **SIZES, device=device, pages=change(pages))
