"""Golden traces of states that quantize tokens and evict none: the checks of a method's golden test.

The state under test runs in lockstep with a float64 state; no choice depends on rounding, so every step is compared
with the record. The CPU replays the small cases, those of one KV head, the GPU all cases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...fixtures import block_traces
from ...fixtures.load import Trace, load_trace
from ...fixtures.quantized_traces import Recorder
from ...fixtures.record_thinkv import inputs
from ..judge import checkers
from ..judge.compare import assert_same, assert_within
from ..judge.lockstep import Lockstep
from ..judge.trace import follow as follow_trace


class Golden(NamedTuple):
    """The capture, and a method's recorder and trace."""

    capture: Trace
    recorder: Recorder
    trace: Trace

    @classmethod
    def load(cls, recorder: Recorder) -> Golden:
        return cls(load_trace(recorder.capture), recorder, load_trace(recorder.name))

    @property
    def cases(self) -> dict[str, Any]:
        found: dict[str, Any] = self.trace.metadata["cases"]
        return found

    def cases_for(self, device: torch.device) -> list[str]:
        return [case for case, about in self.cases.items() if about["heads"] or device.type == "cuda"]

    def started(self, side: Any, case: str, device: torch.device, dtype: torch.dtype) -> Any:
        """An empty state of the case, with its query, key and value [1, H, T, D] in `dtype`."""
        pair = checkers.pair(self.recorder.method)
        assert pair.state is not None and pair.config is not None
        about = self.cases[case]
        tensors = inputs(self.capture, about, dtype, device)
        made = getattr(checkers.module(side, pair), pair.state.__name__)
        return made(pair.config(**about["config"]), **block_traces.sizes(tensors)), tensors

    def follow(self, case: str, twins: Any, device: torch.device) -> None:
        """A bfloat16 state under test, step by step, and what it holds at the end."""
        about = self.cases[case]
        tested, tensors = self.started(twins.optimized, case, device, torch.bfloat16)
        exact, _ = self.started(twins.reference, case, device, torch.float64)
        adapter = checkers.ask(self.recorder.method, "Adapter", None)()
        both, prompt = Lockstep(tested, exact, adapter), about["prompt"]
        recorded = self.trace.tensors[f"{case}.output"].to(device)
        allowed = self.recorder.tolerance(self.capture, about)
        with follow_trace():
            both.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
            for step in range(about["steps"]):
                output = both.step(*(tensor[:, :, prompt + step] for tensor in tensors))
                what = f"recorded output of step {step}"
                assert_within(output, recorded[None, step], adapter.bound + allowed, what=what)
        for name, tensor in self.recorder.contents(tested).items():
            assert_same(tensor, self.trace.tensors[f"{case}.{name}"].to(device), what=name)
