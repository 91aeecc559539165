"""LongFlow over pages: the same results as over slots in one tensor, wherever the pages lie:
what only our own sides promise.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.paged_states import (
    OWN_LAYOUTS,
    assert_only_own_slots_were_written,
    empty_pages,
    filled_pages,
    move,
    name_of,
)
from kvtwin.conformance.cases.paged_view import LAYOUTS, PagedLayout, PagedView
from kvtwin.conformance.cases.strategies import decode_cases, state_traces
from kvtwin.conformance.judge import bounds, lockstep
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.judge.pages import judge_paged
from kvtwin.conformance.suite.longflow.test_longflow_pages import SIDES, SIZES, changed, each_side, over_pages
from kvtwin.reference.contract import Pages

pytestmark = pytest.mark.first

each_layout = pytest.mark.parametrize("layout", OWN_LAYOUTS, ids=name_of)
few = settings(max_examples=max(2, settings().max_examples // 5))


def pages_of(view: PagedView) -> Pages:
    caches = (view.key_cache, view.value_cache)
    if view.layout.order == "heads_first":
        caches = tuple(cache.transpose(1, 2) for cache in caches)
    return Pages(*caches, view.block_table)


@pytest.mark.kind("equivalence")
@each_side
@given(data=st.data())
def test_longflow_over_pages_is_right_in_every_layout(side, data, twins):
    """Shared pages, pages of free slots alone (-1), NaN in all unused memory; the same bits in every layout."""
    case = dataclasses.replace(data.draw(decode_cases()), per_head=False)
    decode = getattr(twins, side).longflow.paged_decode_attention
    judge_paged(case, lambda view: decode(
        view.query, pages_of(view), view.occupied, scale=view.scale, protected=view.protected
    ))  # fmt: skip


@pytest.mark.kind("laws")
@each_side
@given(data=st.data())
@few
def test_longflow_over_pages_has_the_bits_of_one_tensor(side, data, twins, device):
    """With slots and protected slots of each KV head, too. On a GPU, where other instructions load the tokens, the
    results are right, and need not have the same bits."""
    case = data.draw(decode_cases(layout=["contiguous"]))
    layout = data.draw(st.sampled_from(OWN_LAYOUTS))
    longflow, inputs = getattr(twins, side).longflow, dict(case.inputs)
    key, value = inputs.pop("key"), inputs.pop("value")
    found = longflow.paged_decode_attention(pages=filled_pages(layout, key, value), **inputs)
    expected = longflow.decode_attention(key=key, value=value, **inputs)
    judge.assert_decode_right(found, case)
    for name, one, other in zip(found._fields, found, expected, strict=True):
        if device.type == "cpu":
            assert_same(one, other, what=name)


@pytest.mark.kind("laws")
@each_side
def test_longflow_over_pages_with_other_strides_of_values(side, twins, device):
    """Values in a cache of their own, beside keys that are joined with something else."""
    case = DecodeCase(batch=2, key_value_heads=2, group=2, slots=70, occupancy="random", device=device.type)
    longflow = getattr(twins, side).longflow
    pages = filled_pages(PagedLayout(16), case.key, case.value)
    apart = filled_pages(PagedLayout(16, apart=True), case.key, case.value)
    one, other = (
        longflow.paged_decode_attention(case.query, pages._replace(key_cache=keys), case.occupied)
        for keys in (pages.key_cache, apart.key_cache)
    )
    for name, mine, theirs in zip(one._fields, one, other, strict=True):
        assert_same(mine, theirs, what=name)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@each_side
@each_layout
@given(data=st.data())
@few
def test_longflow_state_over_pages_keeps_step_with_float64(side, layout, data, twins):
    trace = data.draw(state_traces("longflow"))
    reorder_at, reset_at = (data.draw(st.sampled_from((-1, trace.steps // 2))) for _ in range(2))
    trace = dataclasses.replace(trace, reorder_at=reorder_at, reset_at=reset_at)
    paged = over_pages(getattr(twins, side).longflow, layout)
    lockstep.run(trace, paged)
    (state,) = paged.made
    assert_only_own_slots_were_written(state.pages, state.config.budget)


def fed(state, steps: int, *, first: int = 0) -> list[torch.Tensor]:
    """The outputs of steps with tokens that depend on their number alone. Each is right for the slots of the state."""
    outputs = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        query, key, value = (torch.randn(2, heads, 16, generator=generator).to(state.device) for heads in (4, 2, 2))
        outputs.append(state.step(query, key, value))
        case = held_by(state, query)
        assert_within(outputs[-1], case.attention.output[:, :, 0], bounds.decode_output(case), what=f"output {step}")
    return outputs


def held_by(state, query: torch.Tensor) -> DecodeCase:
    """A decode step over the slots of a state."""
    return DecodeCase.of(query, state.key, state.value, state.occupied, per_head=state.occupied.dim() == 3)


def new(side, twins, device, layout: PagedLayout | None, **more):
    longflow = getattr(twins, side).longflow
    made = longflow if layout is None else over_pages(longflow, layout)
    return made.LongFlowState(longflow.LongFlowConfig(budget=19, **more), **SIZES, device=device)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
def test_longflow_does_not_notice_that_pages_move(side, per_head, twins, device):
    still, moved = (new(side, twins, device, PagedLayout(4, spare=2), per_head=per_head) for _ in range(2))
    for round_ in range(3):
        for one, other in zip(fed(still, 10, first=10 * round_), fed(moved, 10, first=10 * round_), strict=True):
            assert_same(one, other, what="output")
        move(moved.pages, seed=round_)
    for name in ("key", "value", "positions", "next_slot", "score"):
        assert_same(getattr(moved, name), getattr(still, name), what=name)


@pytest.mark.kind("laws")
@each_side
def test_the_slots_of_the_state_are_those_of_the_function(side, twins, device):
    """An engine may call the function on a state's pages: it finds the same slot to overwrite."""
    state = new(side, twins, device, PagedLayout(4), protect_newest=False)
    fed(state, 30)
    query = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(29)).to(device)
    found = getattr(twins, side).longflow.paged_decode_attention(query, state.pages, state.occupied)
    assert_same(found.slot, state.next_slot, what="slot")
    judge.assert_decode_right(found, held_by(state, query))


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
def test_rows_of_pages_are_reordered_and_reset(side, twins, device):
    """As in tensors of the state's own."""
    paged, plain = (new(side, twins, device, layout, sinks=2) for layout in (PagedLayout(4, seed=1), None))
    index = torch.tensor([1, 1], device=device)
    for state in (paged, plain):
        fed(state, 25)
        state.reorder(index)
        fed(state, 5, first=25)
    assert_same(paged.positions, plain.positions, what="positions")
    assert_same(paged.key, plain.key, what="key")
    paged.reset()
    assert not paged.occupied.any()
    fed(paged, 1)
    assert paged.positions[:, 0].tolist() == [0, 0]


def unlike(size: int, slots: int, device: torch.device, *, transposed: bool) -> Pages:
    """Pages of keys and values with other strides, and a block table with columns that nothing may read: of a page that
    exists, so that a wrong result shows it, and of -1."""
    sizes = {"batch": 2, "slots": slots, "key_value_heads": 2, "head_dim": 16, "dtype": torch.float32, "device": device}
    key, _, table = empty_pages(PagedLayout(size, "heads_first"), **sizes)
    _, value, _ = empty_pages(PagedLayout(size, apart=True), **sizes)
    wide = torch.cat((table, torch.zeros_like(table), torch.full_like(table, -1)), 1)
    return Pages(key, value, wide.t().contiguous().t() if transposed else wide)


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
@pytest.mark.parametrize("transposed", [False, True], ids=["wide", "transposed"])
@pytest.mark.parametrize(("size", "budget"), [(4, 19), (64, 150)])
def test_pages_of_any_strides_hold_what_one_tensor_does(side, size, budget, transposed, twins, device):
    longflow = getattr(twins, side).longflow
    over_pages(longflow, PagedLayout(4))                # not provided unless the state takes pages
    pages = unlike(size, budget, device, transposed=transposed)
    config = longflow.LongFlowConfig(budget=budget, sinks=1)
    paged = longflow.LongFlowState(config, **SIZES, device=device, pages=pages)
    plain = longflow.LongFlowState(config, **SIZES, device=device)
    generator = torch.Generator().manual_seed(3)
    prompt = [torch.randn(2, heads, budget + 9, 16, generator=generator).to(device) for heads in (4, 2, 2)]
    outputs = [state.prefill(*prompt) for state in (paged, plain)]
    assert_same(*outputs, what="output of the prompt, which is not read from pages")
    for state in (paged, plain):
        fed(state, 6)
    for name in ("positions", "key", "value"):
        assert_same(getattr(paged, name), getattr(plain, name), what=name)
    query = torch.randn(2, 4, 16, generator=generator).to(device)
    judge.assert_decode_right(longflow.paged_decode_attention(query, pages, plain.occupied), held_by(plain, query))


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
def test_a_pickled_state_goes_on_in_one_cache(side, twins, device):
    """Keys and values of a pickled state are in its own pages, also after its rows were reordered."""
    states = [new(side, twins, device, PagedLayout(4, joined=True))]
    fed(states[0], 25)
    states.append(pickle.loads(pickle.dumps(states[0])))
    outputs = []
    for state in states:
        state.reorder(torch.tensor([1, 1], device=device))
        outputs.append(fed(state, 5, first=25))
    for one, other in zip(*outputs, strict=True):
        assert_same(one, other, what="output")


@pytest.mark.kind("laws")
@each_side
def test_pages_allocated_in_inference_mode_work_there(side, twins, device):
    with torch.inference_mode():
        state = new(side, twins, device, PagedLayout(4))
        fed(state, 22)
        state.reorder(torch.tensor([1, 0], device=device))
        fed(state, 3, first=22)
        assert state.tokens_seen == 25


@pytest.mark.kind("laws")
@each_side
def test_a_copy_of_a_state_has_pages_of_its_own(side, twins, device):
    state = new(side, twins, device, PagedLayout(4, "heads_first", joined=True))
    fed(state, 25)
    copied = copy.deepcopy(state)
    before = state.key
    outputs = fed(copied, 5, first=25)
    assert_same(state.key, before, what="key of the original")
    for one, other in zip(outputs, fed(state, 5, first=25), strict=True):
        assert_same(one, other, what="output")


@pytest.mark.limits
@pytest.mark.parametrize(("more", "error", "says"), [
    ({"dtype": torch.float64}, TypeError, "must be one of torch.float32, torch.float16, torch.bfloat16"),
    ({"head_dim": 8}, ValueError, "head_dim must be from 16 to 256"),
], ids=["float64", "head_dim"])
def test_what_kernels_cannot_take_is_refused(more, error, says, twins, device):
    sizes = {"key_value_heads": 2, "head_dim": 16, "dtype": torch.float32, **more}
    pages = empty_pages(PagedLayout(4), batch=2, slots=8, **sizes, device=device)
    query = torch.zeros(2, 4, sizes["head_dim"], dtype=sizes["dtype"], device=device)
    occupied = torch.zeros(2, 8, dtype=torch.bool, device=device)
    with pytest.raises(error, match=says):
        twins.optimized.longflow.paged_decode_attention(query, pages, occupied)


def test_columns_behind_the_slots_are_ignored(twins, device):
    key = torch.zeros(1, 2, 8, 16, device=device)
    pages = filled_pages(PagedLayout(4), key, key.clone())
    pages = changed(pages, block_table=torch.nn.functional.pad(pages.block_table, (0, 2), value=99))
    occupied = torch.ones(1, 8, dtype=torch.bool, device=device)
    for side in SIDES:
        found = getattr(twins, side).longflow.paged_decode_attention(key[:, :, 0], pages, occupied, check_finite=True)
        assert found.slot.tolist() == [0]


def test_layouts_of_states_share_no_pages_and_have_an_odd_size():
    assert not any(layout.shared for layout in OWN_LAYOUTS)
    assert {layout.page_size for layout in OWN_LAYOUTS} == {1, 5, 16, 64}
    assert len(OWN_LAYOUTS) == len(LAYOUTS)
