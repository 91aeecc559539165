"""LongFlow over several ranks: they evict together what one rank with all heads evicts."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import DECIDED, TRACE_CONTENTS, state_traces, window_cases
from kvtwin.conformance.methods.ranks import longflow as on_ranks
from kvtwin.conformance.methods.ranks import sharded, states

#: Ranks, KV heads and query heads per KV head: as many heads on all ranks; not; and more ranks than KV heads.
SPREADS = ((2, 2, 2), (2, 3, 1), (2, 1, 4), (3, 3, 1), (4, 2, 2))

#: The reference's float32 may score equal tokens differently: it is the oracle in float64 only.
CONTENT = {"optimized": TRACE_CONTENTS, "reference": ("ordinary",)}

pytestmark = [
    pytest.mark.slow_on_cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.whole,
]
each_side = pytest.mark.parametrize("side", ["optimized", "reference"])
each_spread = pytest.mark.parametrize("heads", SPREADS, ids=str)
few = settings(max_examples=states.fewer(settings().max_examples))


def spread(trace: StateTrace, heads: tuple[int, int, int]) -> StateTrace:
    """The trace with these heads. Heads that decide for themselves cannot be on several ranks."""
    return states.spread(trace, heads, **({"per_head": False} if heads[0] > heads[1] else {}))


@pytest.mark.kind("equivalence")
@each_side
@each_spread
@given(data=st.data())
@few
def test_longflow_on_ranks_keeps_step_with_float64(side, heads, data, pools):
    """Prompts, rows that are reordered, and a reset in the middle; all ranks hold the same bits after each step."""
    trace = spread(data.draw(state_traces("longflow", content=CONTENT[side])), heads)
    reorder_at, reset_at = (data.draw(st.sampled_from((-1, trace.steps // 2))) for _ in range(2))
    pools(heads[0]).run(states.keeps_step, side, replace(trace, reorder_at=reorder_at, reset_at=reset_at))


@pytest.mark.kind("equivalence")
@each_side
@each_spread
@pytest.mark.parametrize("padding", ["none", "random"])
def test_longflow_on_ranks_keeps_step_after_a_long_prompt(side, heads, padding, pools, device):
    """The heads of all ranks decide which tokens of the prompt stay, even if each head evicts for itself later."""
    config = {"budget": 9, "window": 3, "kernel_size": 3, "sinks": 1, "per_head": padding == "none"}
    trace = StateTrace(
        method="longflow", batch=2, head_dim=16, prompt=60, steps=2, config=tuple(config.items()), padding=padding,
        seed=21, device=str(device),
    )
    pools(heads[0]).run(states.keeps_step, side, spread(trace, heads))


@pytest.mark.kind("equivalence")
@each_side
@given(data=st.data())
@few
def test_longflow_on_ranks_over_pages_keeps_step_with_float64(side, data, pools):
    trace = spread(data.draw(state_traces("longflow", content=CONTENT[side])), (2, 3, 1))
    pools(2).run(on_ranks.keeps_step_over_pages, side, replace(trace, reorder_at=trace.steps // 2))


@pytest.mark.kind("equivalence")
@each_side
@each_spread
@given(data=st.data())
@few
def test_longflow_compresses_prompts_on_ranks_as_float64_would(side, heads, data, pools):
    """The functions of LongFlow and SnapKV keep the tokens that float64 keeps for all heads, and compute its scores."""
    case = data.draw(window_cases(content=[one for one in DECIDED if one in CONTENT[side]]))
    case = replace(case, key_value_heads=heads[1], group=heads[2])
    pools(heads[0]).run(on_ranks.compresses, side, case)


DIFFERENT = {
    "batch": (
        {"batch": 3}, "batch must be the same on all ranks of process_group, got 2 on its rank 0 and 3 on its rank 1"
    ),
    "budget": ({"budget": 5}, "config must be the same on all ranks of process_group, got LongFlowConfig(budget=4"),
    "group": ({"query_heads": 3}, "query_heads_per_key_value_head must be the same on all ranks"),
    "head_dim": ({"head_dim": 32}, "head_dim must be the same on all ranks"),
    "dtype": ({"dtype": torch.float16}, "dtype must be the same on all ranks"),
}


@pytest.mark.kind("laws")
@pytest.mark.parametrize(("on_rank_1", "says"), DIFFERENT.values(), ids=DIFFERENT)
@each_side
def test_ranks_that_differ_are_refused_on_all_ranks(side, on_rank_1, says, pools, device):
    for said in pools(2).run(states.constructs, side, "longflow", device.type, on_rank_1):
        assert said is not None
        assert said.startswith(says)


PROMPTS = {
    # What differs on rank 1; the names in the messages of prefill and of SnapKV's compress.
    "tokens": ({"tokens": 3}, ("tokens", "tokens")),
    "padding": ({"padding": 2}, ("occupied", "occupied")),
    "budget": ({"budget": 5}, ("", "budget")),
}


@pytest.mark.kind("laws")
@pytest.mark.parametrize(("on_rank_1", "names"), PROMPTS.values(), ids=PROMPTS)
@each_side
def test_prompts_that_differ_are_refused_on_all_ranks(side, on_rank_1, names, pools, device):
    """Also if a prompt is longer than the budget on one rank only. The state goes on as if it had not been asked."""
    pool = pools(2)
    said_by = (
        pool.run(states.prompts_that_differ, side, "longflow", device.type, on_rank_1),
        pool.run(on_ranks.prompts_that_differ, side, device.type, on_rank_1),
    )
    for said in zip(*said_by, strict=True):
        for name, one in zip(names, said, strict=True):
            assert one.startswith(f"{name} must be the same on all ranks of process_group" if name else "")
            assert bool(one) == bool(name)


@pytest.mark.kind("laws")
@each_side
def test_what_is_no_process_group_is_refused(side, device):
    method, snapkv = (importlib.import_module(f"kvtwin.{side}.{name}") for name in ("longflow", "baselines.snapkv"))
    with pytest.raises(TypeError, match="process_group must be a torch.distributed.ProcessGroup or None, got int"):
        method.LongFlowState(method.LongFlowConfig(budget=4), device=device, process_group=2, **states.SIZES)
    window, key = torch.zeros(1, 2, 2, 16, device=device), torch.zeros(1, 1, 4, 16, device=device)
    with pytest.raises(TypeError, match="process_group must be a torch.distributed.ProcessGroup or None, got str"):
        method.compress_prefill(window, key, key, 3, process_group="gloo")
    with pytest.raises(ValueError, match="process_group needs shared_heads=True"):
        snapkv.window_score(window, key, process_group="gloo")


@pytest.mark.kind("laws")
@each_side
def test_after_an_error_between_ranks_a_state_needs_a_reset(side, pools, device):
    for said in pools(2).run(states.interrupted, side, "longflow", device.type):
        assert said == "LongFlowState is incomplete, because an error interrupted step(): call reset()"


@pytest.mark.kind("laws")
@each_side
def test_a_copy_decides_with_the_same_ranks(side, pools, device):
    pools(2).run(states.copies, side, "longflow", device.type)


@pytest.mark.parametrize(("heads", "expected"), [
    ((8, 4, 2), [((0, 4), (0, 2)), ((4, 8), (2, 4))]),
    ((6, 3, 2), [((0, 2), (0, 1)), ((2, 6), (1, 3))]),
    ((8, 2, 4), [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]),
])
def test_the_heads_of_each_rank(heads, expected):
    assert sharded.shares(*heads) == expected


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("members", [[1, 2], [2]], ids=str)
@each_side
def test_longflow_on_some_of_the_ranks_keeps_step_with_float64(side, members, pools, device):
    """A process group whose ranks have other numbers than all ranks; a group of one rank."""
    trace = StateTrace(
        method="longflow", config=(("budget", 5), ("sinks", 1)), batch=2, key_value_heads=3, group=2, head_dim=16,
        prompt=9, steps=7, seed=8, device=str(device),
    )
    pools(4).run(states.keeps_step_in_a_part, side, trace, members)  # all ranks of the pool construct the group


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("heads", [(2, 3, 2), (4, 2, 4)], ids=str)
def test_longflow_of_many_slots_on_ranks_keeps_step_with_float64(heads, pools, device):
    """Several tiles and splits of attention, and several chunks of the ranking."""
    slots = 100 if device.type == "cpu" else 3000
    trace = spread(StateTrace(
        method="longflow", config=(("budget", slots), ("sinks", 2)), batch=2, key_value_heads=1, group=1, head_dim=64,
        dtype=torch.bfloat16, prompt=slots + 7, padding="left_padding", steps=4, seed=9, device=str(device),
        reorder_at=2,
    ), heads)
    pools(heads[0]).run(states.keeps_step, "optimized", trace)
