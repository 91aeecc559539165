"""The attention of a whole prompt, which every method's prefill shares, over several tiles of queries and keys."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.layouts import MIXED
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import bounds, lockstep
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.reference.longflow import LongFlowConfig


@pytest.mark.kind("equivalence")
@pytest.mark.property("accuracy")
@pytest.mark.parametrize("padding", ["none", "random"])
@pytest.mark.parametrize("tokens", [17, 33, 48, 65, 193])
def test_longflow_attends_to_every_tile_of_a_prompt(tokens, padding, twins, device):
    """In the interpreter, tiles have 16 tokens, or 64 in long prompts. The last one has a single token, or it is full.
    No two tensors have a stride in common."""
    trace = StateTrace(
        method="longflow", config=(("budget", tokens + 1),), prompt=tokens, steps=1, padding=padding, layout=MIXED,
        batch=2 if tokens < 100 else 1, key_value_heads=2 if tokens < 100 else 1, group=2, head_dim=24,
        dtype=torch.float32, seed=tokens, device=str(device),
    )
    state = twins.optimized.longflow.LongFlowState(LongFlowConfig(budget=tokens + 1), **trace.sizes)
    prompt = trace.prompt_inputs
    output = state.prefill(**prompt)
    if prompt["occupied"] is None:
        prompt["occupied"] = torch.ones(trace.batch, tokens, dtype=torch.bool, device=device)
    truth = attend(**prompt, scale=trace.scale, causal=True).output
    assert_within(output, truth, bounds.causal_output(**prompt, scale=trace.scale), what="prefill's output")


@pytest.mark.parametrize(("padding", "content"), [
    ("none", "ordinary"), ("none", "duplicates"), ("random", "ordinary"), ("stairs", "ordinary")
])
@pytest.mark.parametrize(("options", "tokens", "steps"), [
    ({"budget": 7, "window": 2, "kernel_size": 3}, 40, 3),
    ({"budget": 24, "window": 9, "sinks": 3}, 150, 3),
    ({"budget": 20, "window": 4, "per_head": True, "kernel_size": 1}, 22, 3),
    ({"budget": 6, "window": 32, "sinks": 2}, 70, 3),
    ({"budget": 24, "window": 9, "prefix_alone": True}, 150, 3),
    ({"budget": 9, "window": 3, "sinks": 5}, 20, 12),
    ({"budget": 10, "sinks": 6}, 8, 14),
])
def test_longflow_keeps_step_after_a_prompt(options, tokens, steps, padding, content, twins, device):
    """Three rows, of which "stairs" leaves few tokens, fewer than sinks with the last two options. Three heads decide
    together which tokens of a long prompt stay."""
    trace = StateTrace(
        method="longflow", batch=3, key_value_heads=3, group=2, head_dim=24, prompt=tokens, steps=steps,
        config=tuple(options.items()), padding=padding, content=content, seed=tokens, device=str(device),
    )
    lockstep.run(trace, twins.optimized.longflow)


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("side", ("reference", "optimized"))
@pytest.mark.parametrize(("prefix_alone", "kept"), [(False, [0, 3, 4]), (True, [1, 3, 4])])
def test_longflow_may_leave_the_window_out_of_the_softmax(prefix_alone, kept, side, twins, device):
    """The first head attends to the window, and less to token 1; the second to token 0. In row 1, token 4 is padding,
    whose query attends to token 2."""
    key = 8 * torch.eye(5, 16).expand(2, 1, 5, 16)
    query = torch.zeros(2, 2, 2, 16)
    query[:, 0, :, 3], query[:, 0, :, 1], query[:, 1, :, 0], query[:, 1, :, 1] = 16, 4, 2, 0.5
    query[1, :, 1] = 100 * torch.eye(16)[2]
    query, key = query.to(device), key.to(device)
    occupied = torch.tensor([[True] * 5, [True] * 4 + [False]], device=device)
    compress = getattr(twins, side).longflow.compress_prefill
    found = compress(query, key, key, 3, window=2, kernel_size=1, occupied=occupied, prefix_alone=prefix_alone)
    assert found.kept.tolist() == [kept, [0, 1, 3]]
