"""Tests of the judge: what a GPU computed is judged on the CPU as it would be judged there. On the CPU, cases are made
to look as if they were on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kvtwin.conformance import discovery, stats
from kvtwin.conformance.cases import case as cases
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, host, lockstep, subjects
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.reference import longflow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


@pytest.fixture
def elsewhere(monkeypatch):
    """Every case is judged on the host, as if it were on a GPU."""
    monkeypatch.setattr(host, "judges", lambda case: True)


@pytest.mark.parametrize(("device", "elements", "judged"), [
    ("cpu", 1, False), ("cuda:0", 1, True), ("cuda", 2**17, True), ("cuda", 2**17 + 1, False),
])
def test_small_cases_of_a_gpu_are_judged_on_the_host(device, elements, judged):
    tensors = {"key": torch.zeros(elements), "value": torch.zeros(elements), "occupied": None}
    assert host.judges(SimpleNamespace(device=device, tensors=tensors)) == judged


class Pair(NamedTuple):
    one: torch.Tensor
    other: object


def test_a_copy_goes_back_as_the_tensor_that_it_was_copied_from():
    """With its strides. What was changed since, on either side, is copied."""
    strided = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)[::2]
    found = host.to_cpu({"key": Pair(strided, [strided, None, "x", 3]), "count": (1, 2)})
    assert isinstance(found["key"], Pair) and found["key"].other[1:] == [None, "x", 3] and found["count"] == (1, 2)
    copy = found["key"].one
    assert torch.equal(copy, strided) and copy.data_ptr() != strided.data_ptr()
    back = host.to_device(found, CPU)
    assert back["key"].one is strided and back["key"].other[0] is strided and back["count"] == (1, 2)
    copy += 1
    assert torch.equal(host.to_device(copy, CPU), strided + 1)
    copy = host.to_cpu(strided)
    strided += 1
    assert torch.equal(host.to_device(copy, CPU), strided - 1)
    assert host.to_device(copy + 1, CPU) is not strided


@pytest.mark.parametrize("pair", discovery.methods(), ids=str)
def test_a_state_keeps_step_as_it_would_there(pair, elsewhere):
    options = {**checkers.with_budget(pair.name, 4), **checkers.ask(pair.name, "SMALL", {})}
    trace = StateTrace(
        method=pair.name, batch=2, key_value_heads=2, group=2, config=tuple(options.items()), prompt=7,
        padding="left_padding", steps=9, reorder_at=3, reset_at=6, seed=3,
    )
    with stats.collect() as counted:
        summary = lockstep.run(trace, pair.reference)
    assert summary.steps == 9 and counted.bound_utilisation <= 1


def test_a_wrong_state_is_found(elsewhere):
    class Forgetful(longflow.LongFlowState):
        def step(self, query, key, value):
            output = super().step(query, key, value)
            self.value[..., 0] += self.tokens_seen > 9
            return output

    trace = StateTrace(config=(("budget", 6),), steps=14)
    with pytest.raises(Mismatch, match="value at step 9"):
        lockstep.run(trace, SimpleNamespace(LongFlowConfig=longflow.LongFlowConfig, LongFlowState=Forgetful))


def test_a_state_gets_the_layouts_of_its_trace(elsewhere):
    seen = []

    class Curious(longflow.LongFlowState):
        def step(self, query, key, value):
            seen.append(key.is_contiguous())
            return super().step(query, key, value)

    trace = StateTrace(config=(("budget", 6),), steps=3, batch=2, key_value_heads=2, layout="spread")
    lockstep.run(trace, SimpleNamespace(LongFlowConfig=longflow.LongFlowConfig, LongFlowState=Curious))
    assert seen == [False] * 3


def test_a_wrong_result_is_found_in_the_copy_of_its_case(elsewhere):
    """The case that a failure saves is the one of the GPU."""
    (subject,) = (one for one in subjects.every() if str(one) == "longflow.decode_attention")
    case = DecodeCase(slots=5, batch=2)
    subject.verify(longflow, case)
    wrong = SimpleNamespace(decode_attention=lambda **inputs: (
        lambda result: result._replace(output=result.output + 1)
    )(longflow.decode_attention(**inputs)))
    with pytest.raises(Mismatch, match="output"):
        subject.verify(wrong, case)
    assert cases.latest() is case
    assert host.of_case(case) is host.of_case(case) is not case
