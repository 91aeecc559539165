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
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.cases.strategies import VANISHING, state_traces
from kvtwin.conformance.judge import bounds, checkers, lockstep, variants
from kvtwin.conformance.judge.compare import assert_same, assert_within

pytestmark = [pytest.mark.main, pytest.mark.first]

every_method = pytest.mark.parametrize("pair", discovery.with_state(), ids=str)
# Methods that store keys and values unchanged.
LOSSLESS = [
    pair for pair in discovery.with_state()
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


@pytest.mark.property("state")
@pytest.mark.kind("equivalence")
@pytest.mark.parametrize(("pair", "variant"), [
    pytest.param(pair, one, id=f"{pair}-{one}", marks=[
        *([pytest.mark.slow_on_cpu] if one.long else ()), *([pytest.mark.served] if one.served else ()),
    ])
    for pair in discovery.with_state() for one in variants.variants_of(pair.name)
])
def test_a_variant_keeps_step(pair, variant, twins, device):
    """All that a method can do, each at once: judge/variants.py."""
    variants.check(pair, variant, checkers.module(twins.optimized, pair), device)


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
