"""EpiKV over several ranks: all have the same hidden states, by which they keep the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.strategies import TRACE_CONTENTS, state_traces
from kvtwin.conformance.methods.ranks import epikv as on_ranks
from kvtwin.conformance.methods.ranks import states
from kvtwin.reference.contract.epikv.config import DIFFERENCES

#: Ranks, KV heads and query heads per KV head: as many heads on all ranks; not; and more ranks than KV heads.
SPREADS = ((2, 2, 2), (2, 3, 1), (3, 3, 1), (4, 2, 2))
CONTENT = {"optimized": TRACE_CONTENTS, "reference": ("ordinary",)}
#: Options of the other policies.
OTHERS = ("tau", "edges", "sparsity_threshold", "segments_by", "bands", "spread")

pytestmark = [
    pytest.mark.slow_on_cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.whole,
]
each_side = pytest.mark.parametrize("side", ["optimized", "reference"])
few = settings(max_examples=states.fewer(settings().max_examples))


@pytest.mark.kind("equivalence")
@each_side
@pytest.mark.parametrize("heads", SPREADS, ids=str)
@given(data=st.data())
@few
def test_epikv_on_ranks_keeps_step_with_float64(side, heads, data, pools):
    """Prompts, rows that are reordered, and a reset in the middle; all ranks hold the same bits after each step."""
    trace = data.draw(state_traces("epikv", content=CONTENT[side]))
    config = {name: one for name, one in trace.config if name not in OTHERS}
    trace = replace(trace, config=tuple({**config, "policy": data.draw(st.sampled_from(DIFFERENCES))}.items()))
    reorder_at, reset_at = (data.draw(st.sampled_from((-1, trace.steps // 2))) for _ in range(2))
    trace = states.spread(replace(trace, reorder_at=reorder_at, reset_at=reset_at), heads)
    pools(heads[0]).run(states.keeps_step, side, trace)


@pytest.mark.kind("laws")
@pytest.mark.parametrize("config", [
    {"policy": "kv_key"}, {"policy": "kv_val"}, {"policy": "lag_kv"}, {"policy": "attn_x_hs"},
    {"policy": "segment_hs", "edges": (0.2, 0.5)},
], ids=lambda config: config["policy"])
@each_side
def test_policies_that_score_by_heads_are_refused(side, config, pools, device):
    for said in pools(2).run(on_ranks.refuses, side, device.type, config, {}):
        assert said.startswith("process_group needs a policy that scores by hidden states alone")
        assert said.endswith(repr(config["policy"]))


@pytest.mark.kind("laws")
@each_side
def test_ranks_that_differ_are_refused_on_all_ranks(side, pools, device):
    for said in pools(2).run(on_ranks.refuses, side, device.type, {}, {"recent": 2}):
        assert said.startswith("config must be the same on all ranks of process_group")


@pytest.mark.kind("laws")
@each_side
def test_a_prompt_with_other_hidden_states_is_refused_on_all_ranks(side, pools, device):
    for said in pools(2).run(on_ranks.scores, side, device.type, 3.0):
        assert "must be the same on all ranks of process_group" in said[0]
        assert said[1] == "EpiKVState is incomplete, because an error interrupted prefill(): call reset()"
    for said in pools(2).run(on_ranks.scores, side, device.type, 1.0):
        assert said == ("", "")
