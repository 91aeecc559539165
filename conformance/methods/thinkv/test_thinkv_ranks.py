"""ThinKV over several ranks: they classify and evict together what one rank with all heads does."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import TRACE_CONTENTS, state_traces
from kvtwin.conformance.cases.thought_cases import segment_cases
from kvtwin.conformance.methods.ranks import states
from kvtwin.conformance.methods.ranks import thinkv as on_ranks

#: Ranks, KV heads and query heads per KV head: as many heads on all ranks; not; and more ranks than KV heads.
SPREADS = ((2, 2, 2), (2, 3, 1), (2, 1, 4), (3, 3, 1), (4, 2, 2))

#: The reference's float32 may compare equal tokens differently: it is the oracle in float64 only.
CONTENT = {"optimized": TRACE_CONTENTS, "reference": ("ordinary",)}

pytestmark = [
    pytest.mark.slow_on_cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.whole,
]
each_side = pytest.mark.parametrize("side", ["optimized", "reference"])
each_spread = pytest.mark.parametrize("heads", SPREADS, ids=str)
few = settings(max_examples=states.fewer(settings().max_examples))


@pytest.mark.kind("equivalence")
@each_side
@each_spread
@given(data=st.data())
@few
def test_thinkv_on_ranks_keeps_step_with_float64(side, heads, data, pools):
    """Prompts, thoughts by the sparsity of all heads, segments that shrink, rows that are reordered, and a reset."""
    trace = states.spread(data.draw(state_traces("thinkv", content=CONTENT[side])), heads)
    reorder_at, reset_at = (data.draw(st.sampled_from((-1, trace.steps // 2))) for _ in range(2))
    pools(heads[0]).run(states.keeps_step, side, replace(trace, reorder_at=reorder_at, reset_at=reset_at))


def long_trace(device, heads, **config):
    """Many segments, which shrink at the end of transitions and, one at a time, when a token exceeds the budget."""
    trace = StateTrace(
        method="thinkv", config=tuple({
            "budget": 14, "tau": 4, "group": 2, "block": 2, "retention": (2, 1), "edges": (0.1, 0.25),
            "sparsity_threshold": 0.4, "max_tokens": 60, **config,
        }.items()), batch=2, head_dim=16, prompt=18, padding="ends", steps=21, seed=5, device=str(device),
    )
    return states.spread(trace, heads)


@pytest.mark.kind("equivalence")
@each_side
@each_spread
@pytest.mark.parametrize("sparsity_of", ["heads", "mean"])
def test_segments_shrink_alike_on_all_ranks(side, heads, sparsity_of, pools, device):
    trace = long_trace(device, heads, sparsity_of=sparsity_of)
    for found in pools(heads[0]).run(on_ranks.shrinks, side, trace):
        assert found == (True, True), "no segment shrank between thoughts, or none at the end of a transition"


@pytest.mark.kind("equivalence")
@each_side
def test_a_row_begins_no_segments_behind_its_last_token(side, pools, device):
    """One row has less tokens than the other, by more than a segment."""
    trace = replace(long_trace(device, (2, 2, 2)), padding="stairs")
    pools(2).run(states.keeps_step, side, replace(trace, reorder_at=-1, reset_at=-1))


@pytest.mark.kind("equivalence")
def test_a_captured_step_of_several_ranks_exchanges_what_any_step_needs(pools, device):
    """After a capture, the host does not know which steps there were."""
    pools(2).run(on_ranks.keeps_step_as_if_captured, long_trace(device, (2, 3, 1)))


@pytest.mark.kind("equivalence")
@each_side
@each_spread
def test_the_sparsity_of_ranks_is_that_of_one_rank_to_the_bit(side, heads, pools, device):
    pools(heads[0]).run(on_ranks.has_the_sparsity_of_one_rank, side, long_trace(device, heads, budget=40))


@pytest.mark.kind("equivalence")
@each_side
@each_spread
@given(data=st.data())
@few
def test_representatives_by_the_keys_of_all_ranks(side, heads, data, pools):
    case = replace(data.draw(segment_cases(tokens=(3, 24), shrinks=True)), key_value_heads=heads[1], flat=False)
    pools(heads[0]).run(on_ranks.represents, side, case)


DIFFERENT = {
    "budget": ({"budget": 5}, "config must be the same on all ranks of process_group, got ThinKVConfig(budget=4"),
    "group": ({"query_heads": 3}, "query_heads_per_key_value_head must be the same on all ranks"),
    "replicas": ({"replicas": 2}, "replicas must be the same on all ranks"),
}


@pytest.mark.kind("laws")
@pytest.mark.parametrize(("on_rank_1", "says"), DIFFERENT.values(), ids=DIFFERENT)
@each_side
def test_ranks_that_differ_are_refused_on_all_ranks(side, on_rank_1, says, pools, device):
    for said in pools(2).run(states.constructs, side, "thinkv", device.type, on_rank_1):
        assert said is not None
        assert said.startswith(says)


@pytest.mark.kind("laws")
@pytest.mark.parametrize("on_rank_1", [{"tokens": 3}, {"padding": 2}], ids=str)
@each_side
def test_prompts_that_differ_are_refused_on_all_ranks(side, on_rank_1, pools, device):
    name = {"tokens": "tokens", "padding": "occupied"}[next(iter(on_rank_1))]
    for said in pools(2).run(states.prompts_that_differ, side, "thinkv", device.type, on_rank_1):
        assert said.startswith(f"{name} must be the same on all ranks of process_group")


@pytest.mark.kind("laws")
@each_side
def test_a_wrong_number_of_replicas_is_refused(side, pools, device):
    for said in pools(3).run(on_ranks.refuses, side, device.type, 2):
        assert said == "replicas must divide the number of ranks, which is 3, got 2"
    method = importlib.import_module(f"kvtwin.{side}.thinkv")
    given_ = {"device": device, **states.SIZES}
    with pytest.raises(ValueError, match="replicas must be 1 without a process_group, got 2"):
        method.ThinKVState(method.ThinKVConfig(), replicas=2, **given_)
    with pytest.raises(TypeError, match="process_group must be a torch.distributed.ProcessGroup or None, got int"):
        method.ThinKVState(method.ThinKVConfig(), process_group=2, **given_)


@pytest.mark.kind("laws")
@each_side
def test_after_an_error_between_ranks_a_state_needs_a_reset(side, pools, device):
    for said in pools(2).run(states.interrupted, side, "thinkv", device.type):
        assert said == "ThinKVState is incomplete, because an error interrupted step(): call reset()"


@pytest.mark.kind("laws")
@each_side
def test_a_copy_decides_with_the_same_ranks(side, pools, device):
    pools(2).run(states.copies, side, "thinkv", device.type)
