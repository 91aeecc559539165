"""Methods with a block cache against their golden traces: the float64 evictions of a trained model's tokens.

There are traces of our own model and of a public one (SmolLM2-135M-Instruct), which has attention sinks, keys with
outlier channels, and three query heads per KV head. The CPU replays the first steps of one KV head (heads choose
independently), and of the public model one layer; the GPU everything. The state under test runs in lockstep with the
reference. Its choices must equal those of the trace up to the first adjudicated tie. After it, only lockstep judges.
Wrong choices are counted to the end of the trace.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.draws import golden_steps
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.judge.trace import follow
from kvtwin.fixtures.block_traces import evicted_token, inputs, sizes
from kvtwin.fixtures.load import Trace, has_trace, load_trace
from kvtwin.reference.blocks import BlockState

GOLDEN = [
    pair for pair in discovery.methods()
    if issubclass(pair.state or object, BlockState) and has_trace(pair.name)
    and "3.64.evicted" in load_trace(pair.name).tensors
]
KNOWN = [pair for pair in GOLDEN if has_trace(f"known_{pair.name}")]
#: Of the public model. The CPU replays the first one, in which some heads attend to the first token alone.
LAYERS = ("18.64", "1.64", "27.64")
pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]


def cases(pair: discovery.Pair) -> list[str]:
    """layer.budget, and layer.budget.form for each other form of the method."""
    return ["3.64", "6.64", *(f"3.64.{form}" for form in checkers.ask(pair.name, "FORMS", {}))]


of_each_case = pytest.mark.parametrize(
    ("pair", "case"), [pytest.param(pair, case, id=f"{case}-{pair}") for pair in GOLDEN for case in cases(pair)]
)


of_known = pytest.mark.parametrize(
    ("pair", "case"), [pytest.param(pair, case, id=f"known-{case}-{pair}") for pair in KNOWN for case in LAYERS]
)


def traces(
    pair: discovery.Pair, case: str, known: bool = False
) -> tuple[Trace, dict[str, torch.Tensor], dict[str, Any]]:
    """The capture, the recorded tensors of the case, and its metadata."""
    prefix = "known_" if known else ""
    capture, golden = load_trace(f"{prefix}capture"), load_trace(f"{prefix}{pair.name}")
    tensors = {name: golden.tensors[f"{case}.{name}"].long() for name in ("held", "evicted", "last")}
    return capture, tensors, golden.metadata["cases"][case]


@pytest.mark.parametrize("pair", GOLDEN, ids=str)
def test_every_recorded_case_is_replayed(pair):
    assert set(load_trace(pair.name).metadata["cases"]) == set(cases(pair))
    assert pair in KNOWN or pair.declared
    assert pair not in KNOWN or set(load_trace(f"known_{pair.name}").metadata["cases"]) == set(LAYERS)


@of_each_case
def test_a_reference_repeats_its_golden_trace(pair, case, twins):
    """All steps of layer 3 in float64: the decisions are equal."""
    repeat(pair, case, twins, traces(pair, case))


@of_known
def test_a_reference_repeats_its_trace_of_a_public_model(pair, case, twins):
    repeat(pair, case, twins, traces(pair, case, known=True))


def repeat(pair, case, twins, found):
    capture, golden, about = found
    prompt, config = capture.metadata["prompt"], pair.config(**about["config"])
    tensors = inputs(capture, about["layer"], torch.float64, "cpu")
    state = getattr(checkers.module(twins.reference, pair), pair.state.__name__)(config, **sizes(tensors))
    for number, start in enumerate(range(0, prompt, config.block_size)):
        state.append_block(*(tensor[:, :, start:min(prompt, start + config.block_size)] for tensor in tensors))
        assert_same(state.positions[0, :, :config.capacity], golden["held"][number], what=f"held after block {number}")
    steps = len(golden["evicted"]) if about["layer"] in (3, 18) else golden_steps()
    for step in range(steps):
        before = state.positions[0, :, :config.capacity].clone()
        state.step(*(tensor[:, :, prompt + step] for tensor in tensors))
        evicted = evicted_token(before, state.positions[0, :, :config.capacity], prompt + step)
        assert_same(evicted, golden["evicted"][step], what=f"the tokens that leave at step {step}")
    if steps == len(golden["evicted"]):
        assert_same(state.positions[0, :, :config.capacity], golden["last"], what="held after the last step")


@of_each_case
def test_a_state_follows_its_golden_trace(pair, case, twins, device):
    follow_trace(pair, cases(pair).index(case), twins, device, traces(pair, case), golden_steps())


@pytest.mark.parametrize("pair", KNOWN, ids=str)
def test_a_state_follows_its_trace_of_a_public_model(pair, twins, device):
    """On the CPU, few steps of a KV head whose query heads attend to the first token alone."""
    for case in LAYERS if device.type == "cuda" else LAYERS[:1]:
        follow_trace(pair, 2, twins, device, traces(pair, case, known=True), golden_steps() // 2)


def follow_trace(pair, head, twins, device, found, most):
    """head, most: the KV head and the steps that the CPU replays, in layer 6 a twelfth of them."""
    capture, golden, about = found
    prompt, steps, capacity = (
        capture.metadata["prompt"], len(golden["evicted"]), pair.config(**about["config"]).capacity
    )
    tensors, heads = inputs(capture, about["layer"], torch.bfloat16, torch.device("cpu")), slice(None)
    if device.type == "cpu":
        steps = most if about["layer"] != 6 else most // 12
        group = tensors[0].shape[1] // tensors[1].shape[1]
        heads = slice(head, head + 1)
        tensors = [tensors[0][:, head * group:(head + 1) * group], *(tensor[:, heads] for tensor in tensors[1:])]
    both = lockstep.pair(
        pair.name, checkers.module(twins.optimized, pair), config=about["config"], on_host=device.type != "cpu",
        **sizes(tensors) | {"device": device},
    )
    golden = {name: tensor[:, heads] for name, tensor in golden.items() if name != "last"}
    followed = 0
    with follow() as wrong:
        both.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
        if not both.summary.adjudicated and not wrong:
            assert_same(both.tested.positions[0, :, :capacity], golden["held"][-1], what="held after the prompt")
        for step in range(steps):
            before = both.tested.positions[0, :, :capacity].clone()
            both.step(*(tensor[:, :, prompt + step] for tensor in tensors))
            if both.summary.adjudicated or wrong:
                continue
            evicted = evicted_token(before, both.tested.positions[0, :, :capacity], prompt + step)
            assert_same(evicted, golden["evicted"][step], what=f"the tokens that leave at step {step}")
            followed += 1
    assert 2 * followed > steps or both.summary.adjudicated
