"""SyncKV over several ranks: a head attends to what the R-head of its cluster selects, wherever that is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import TRACE_CONTENTS, state_traces
from kvtwin.conformance.methods.ranks import states
from kvtwin.conformance.methods.ranks import synckv as on_ranks
from kvtwin.reference.synckv import HeadClusters

#: Ranks, KV heads and query heads per KV head; the clusters of the heads. A rank has several R-heads, one, or none.
SPREADS = (
    ((2, 2, 2), HeadClusters((0, 0), (1,))),
    ((2, 3, 1), HeadClusters((1, 0, 1), (1, 2))),
    ((2, 4, 1), HeadClusters((1, 0, 0, 1), (1, 0))),
    ((2, 1, 4), HeadClusters((0,), (0,))),
    ((3, 3, 1), HeadClusters((0, 0, 0), (1,))),
    ((4, 2, 2), HeadClusters((1, 0), (1, 0))),
)

#: The reference's float32 may compare equal tokens differently: it is the oracle in float64 only.
CONTENT = {"optimized": TRACE_CONTENTS, "reference": ("ordinary",)}

pytestmark = [
    pytest.mark.slow_on_cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.whole,
]
each_side = pytest.mark.parametrize("side", ["optimized", "reference"])
each_spread = pytest.mark.parametrize(("heads", "clusters"), SPREADS, ids=[str(heads) for heads, _ in SPREADS])
few = settings(max_examples=states.fewer(settings().max_examples))


@pytest.mark.kind("equivalence")
@each_side
@each_spread
@given(data=st.data())
@few
def test_synckv_on_ranks_keeps_step_with_float64(side, heads, clusters, data, pools):
    """Prompts, anticipations, rows that are reordered, and a reset in the middle; a step that might be any step."""
    more = {"clusters": len(clusters.representatives), "union_clusters": data.draw(st.booleans())}
    trace = states.spread(data.draw(state_traces("synckv", content=CONTENT[side])), heads, **more)
    reorder_at, reset_at = (data.draw(st.sampled_from((-1, trace.steps // 2))) for _ in range(2))
    trace = replace(trace, reorder_at=reorder_at, reset_at=reset_at)
    pools(heads[0]).run(on_ranks.keeps_step, side, trace, clusters, data.draw(st.booleans()))


def fixed_trace(device, heads, **config):
    trace = StateTrace(
        method="synckv", config=tuple({"k": 5, "stride": 2, "max_tokens": 40, **config}.items()), batch=2,
        head_dim=16, prompt=11, padding="left_padding", steps=9, seed=3, device=str(device), reorder_at=5,
    )
    return states.spread(trace, heads)


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("config", [{"exclude_static": False}, {"offload": True}, {"phase": 1}], ids=str)
def test_options_of_states_on_ranks(config, pools, device):
    for heads, clusters in (SPREADS[0], SPREADS[1]):
        trace = fixed_trace(device, heads, clusters=len(clusters.representatives), **config)
        pools(2).run(on_ranks.keeps_step, "optimized", trace, clusters, False)


@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("heads", [(2, 3, 1), (3, 3, 1), (2, 4, 2)], ids=str)
def test_ranks_select_what_one_rank_selects_to_the_bit(side, heads, pools, device):
    """Where no two ranks hold the same KV head, an R-head's weights do not depend on the ranks."""
    trace = replace(fixed_trace(device, heads, clusters=2), reorder_at=-1)
    pools(heads[0]).run(on_ranks.does_as_one_rank, side, trace)


DIFFERENT = {
    "k": ({"budget": 5}, "config must be the same on all ranks of process_group, got SyncKVConfig(k=4"),
    "dtype": ({"dtype": torch.float16}, "dtype must be the same on all ranks"),
    "replicas": ({"replicas": 2}, "replicas must be the same on all ranks"),
}


@pytest.mark.kind("laws")
@pytest.mark.parametrize(("on_rank_1", "says"), DIFFERENT.values(), ids=DIFFERENT)
@each_side
def test_ranks_that_differ_are_refused_on_all_ranks(side, on_rank_1, says, pools, device):
    for said in pools(2).run(states.constructs, side, "synckv", device.type, on_rank_1):
        assert said is not None
        assert said.startswith(says)


@pytest.mark.kind("laws")
@each_side
def test_clusters_are_of_the_heads_of_all_ranks(side, pools, device):
    for said in pools(2).run(on_ranks.constructs, side, device.type, HeadClusters((0, 0, 0), (1,))):
        assert said == "head_clusters needs one label per KV head: expected 2, got 3"


@pytest.mark.kind("laws")
@pytest.mark.parametrize("on_rank_1", [{"tokens": 3}, {"padding": 2}], ids=str)
@each_side
def test_prompts_that_differ_are_refused_on_all_ranks(side, on_rank_1, pools, device):
    name = {"tokens": "tokens", "padding": "occupied"}[next(iter(on_rank_1))]
    for said in pools(2).run(states.prompts_that_differ, side, "synckv", device.type, on_rank_1):
        assert said.startswith(f"{name} must be the same on all ranks of process_group")


@pytest.mark.kind("laws")
@each_side
def test_after_an_error_between_ranks_a_state_needs_a_reset(side, pools, device):
    for said in pools(2).run(states.interrupted, side, "synckv", device.type):
        assert said == "SyncKVState is incomplete, because an error interrupted step(): call reset()"


@pytest.mark.kind("laws")
@each_side
def test_a_copy_decides_with_the_same_ranks(side, pools, device):
    pools(2).run(states.copies, side, "synckv", device.type)
