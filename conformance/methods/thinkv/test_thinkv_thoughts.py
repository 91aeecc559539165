"""ThinKV's thoughts under test: the sparsity of a decode step, its thought type, and the calibration of thresholds:
what only our own sides promise.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.thought_cases import sparsity_cases
from kvtwin.conformance.judge.checkers import thinkv_thoughts as judge
from kvtwin.conformance.suite.thinkv.test_thinkv_thoughts import SIDES, aimed, few, module_of, spikes

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.main]

some = settings(max_examples=max(at_least(4), settings().max_examples // 3))


@given(case=sparsity_cases())
@some
def test_sparsity_is_what_float64_says(case, twins):
    """For any shape, dtype, layout, mask and content, with poisoned free slots."""
    judge.assert_sparsity_right(twins.optimized.thinkv.attention_sparsity(**case.inputs), case)


@given(case=sparsity_cases(slots=(20, 48), content=("ordinary",)))
@few
def test_sparsity_of_the_reference_in_float32_is_right_too(case, twins):
    inputs = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in case.inputs.items()
    }
    judge.assert_sparsity_right(twins.reference.thinkv.attention_sparsity(**inputs), case)


def test_sparsity_excludes_weights_at_the_threshold(twins):
    """A token must be strictly below the threshold. In float64, the threshold is its exact share of the largest weight,
    and the next larger number."""
    case = aimed("cpu", [[1.0, 0.25]])
    query, key = case.query.double(), case.key.double()
    call = twins.reference.thinkv.attention_sparsity
    logits = key[0, 0, :, 0]
    first, second = (logits - logits.max()).softmax(-1).tolist()
    threshold = next(
        ratio for ratio in (math.nextafter(second / first, end) for end in (0, second / first, 1))
        if ratio * first == second
    )
    assert call(query, key, case.occupied, threshold=threshold, scale=1.0).tolist() == [0.0]
    above = threshold
    while above * first == second:
        above = math.nextafter(above, 1)
    assert call(query, key, case.occupied, threshold=above, scale=1.0).tolist() == [0.5]


@SIDES
def test_classify_rounds_its_edges_to_float32(side, twins, device):
    """float32(0.7) is less than 0.7, but counts as on the edge."""
    assert torch.tensor(0.7).double().item() < 0.7
    assert module_of(twins, side).classify(torch.tensor([0.7], device=device), (0.1, 0.7)).tolist() == [0]
    strided = torch.tensor([[0.2, 0.9], [0.8, 0.05]], device=device).T
    assert module_of(twins, side).classify(strided, (0.1, 0.7)).tolist() == [[2, 0], [0, 1]]


@SIDES
def test_calibrate_says_how_many_modes_there_are(side, twins, device):
    prompts = [torch.stack([spikes(0.1, 0.5, 0.9), spikes(0.2, 0.8, 0.8), spikes(0.4, times=120)])] * 2
    prompts[1] = prompts[1][[0, 2, 2]]
    with pytest.raises(ValueError, match=(
        r"traces must have at least layers = 2 layers with 3 modes in some prompt, got 1; modes by prompt: "
        r"layer 0: 3, 3; layer 1: 2, 1; layer 2: 1, 1"
    )):
        module_of(twins, side).calibrate([prompt.to(device) for prompt in prompts], layers=2)


def test_calibrate_of_the_reference_asks_for_scipy(twins, device, monkeypatch):
    """The optimized side does not need it."""
    traces = [torch.stack([spikes(0.1, 0.5, 0.9)] * 2).to(device)]
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert twins.optimized.thinkv.calibrate(traces, layers=1).layers == (0,)
    with pytest.raises(ImportError, match=r"calibrate needs scipy.*pip install 'kvtwin\[calibrate\]'"):
        twins.reference.thinkv.calibrate(traces, layers=1)
