"""Every method's state against its reference in float64, step by step. Methods are discovered; none is named here.

judge/checkers/<method>.py has the configs, and the bounds beyond attention itself.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import supported
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.strategies import DECIDED, VANISHING, state_traces
from kvtwin.conformance.judge import bounds, checkers, lockstep
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.judge.oracle import attend

every_method = pytest.mark.parametrize("pair", discovery.methods(), ids=str)
# Methods that store keys and values unchanged.
LOSSLESS = [
    pair for pair in discovery.methods()
    if not checkers.ask(pair.name, "LOSSY", False)
    and {"key", "value"} <= set(checkers.ask(pair.name, "Adapter", lockstep.Adapter).stored)
]

some = settings(max_examples=max(at_least(4), settings().max_examples // 3))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


@pytest.mark.property("state")
@pytest.mark.kind("equivalence")
@every_method
@given(data=st.data())
@some
def test_a_state_keeps_step_with_float64(pair, data, twins):
    """For any config: prompts (compressed, padded or none), fill-before-evict, slot reuse, protection."""
    trace, module = data.draw(state_traces(pair.name)), checkers.module(twins.optimized, pair)
    lockstep.run(trace, module)
    if trace.content in VANISHING:
        # Few of these decisions are decisive. Add as many that are, so that the test is not vacuous for any draw.
        lockstep.run(dataclasses.replace(trace, content="ordinary"), module)


@pytest.mark.slow_on_cpu
@pytest.mark.property("state")
@pytest.mark.kind("equivalence")
@every_method
@given(data=st.data())
@settings(max_examples=max(at_least(3), settings().max_examples // 10))
def test_rows_that_differ_keep_step_in_another_order_and_after_a_reset(pair, data, twins):
    """Rows of different prompts go on in another order. Then the state is reset, and fed without a prompt. With
    max_batch = 1, it is the order of one row."""
    rows = supported.rows(3)
    trace = data.draw(state_traces(
        pair.name, prompt=True, padding=("stairs",), content=DECIDED, max_budget=8, max_prompt=12
    ))  # fmt: skip
    # Rows of at least 8, 2 and 1 tokens, and budgets of at least 5 unless they are declared.
    options = trace.options
    for name in checkers.with_budget(pair.name, 5):
        options = {**options, name: supported.values(name, (max(5, options[name]),))[0]}
    heads = supported.sizes("kv_heads", (max(2, trace.key_value_heads),))[0]
    trace = dataclasses.replace(
        trace, batch=rows, key_value_heads=heads, config=tuple(options.items()),
        prompt=trace.prompt * -(-8 // trace.prompt), steps=10,
        reorder_at=2, reset_at=8,
    )
    lockstep.run(trace, checkers.module(twins.optimized, pair))


@pytest.mark.property("state")
@pytest.mark.kind("laws")
@pytest.mark.parametrize("pair", LOSSLESS, ids=str)
@given(data=st.data())
@few
def test_full_budget_is_full_attention(pair, data, twins):
    """With budget >= tokens, every output is attention over all tokens so far, and nothing is evicted."""
    trace = data.draw(state_traces(pair.name, max_prompt=12, max_steps=6))
    total = trace.prompt + trace.steps
    budget = checkers.ask(pair.name, "BUDGET", "budget")
    plain = checkers.ask(pair.name, "PLAIN", {})
    config = pair.config(**{**trace.options, **plain, budget: max(total + 1, trace.options[budget])})
    state = getattr(checkers.module(twins.optimized, pair), pair.state.__name__)(config, **trace.sizes)
    prompt = trace.prompt_inputs
    occupied = torch.ones(trace.batch, total, dtype=torch.bool, device=trace.device)
    keys, values = [], []
    if prompt is not None:
        more = checkers.extras(state, prompt["query"], prompt["key"], prompt["value"])
        output = state.prefill(**prompt, **more)
        if prompt["occupied"] is not None:
            occupied[:, :trace.prompt] = prompt["occupied"]
        keys, values = [prompt["key"]], [prompt["value"]]
        whole = {**prompt, "occupied": occupied[:, :trace.prompt]}
        truth = attend(**whole, scale=trace.scale, causal=True).output
        assert_within(output, truth, bounds.causal_output(**whole, scale=trace.scale), what="prefill's output")
    for step in range(trace.steps):
        token = trace.step_inputs(step)
        keys.append(token["key"][:, :, None])
        values.append(token["value"][:, :, None])
        seen = occupied[:, :trace.prompt + step + 1]
        full = DecodeCase.of(token["query"], torch.cat(keys, 2), torch.cat(values, 2), seen, scale=trace.scale)
        truth = full.attention.output[:, :, 0]
        output = state.step(**token, **checkers.extras(state, **token))
        assert_within(output, truth, bounds.decode_output(full), what=f"output of step {step}")
    held, expected = state.occupied.sum(-1), seen.sum(-1)
    assert_same(held, (expected[:, None] if held.dim() == 2 else expected).expand(held.shape), what="tokens held")
