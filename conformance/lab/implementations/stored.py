"""The table of stored implementations that are wrong: what the verdict says of each, and under which property."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...judge.properties import FAIR_PLAY
from . import longflow
from .exploits import borrowing, ending, looking, replacing, results, states

CALLS, STATE = "test_calls_do", "test_numbers and State"
LAUNCHES, ALL = "test_many_launches", "test_properties and decode_attention and not fp8 and not paged"
REFERENCE = "kvtwin.reference.longflow.decode_attention"


class Row(NamedTuple):
    """exploit: the function or class; says: a part of the cause; shows: the wrong property; tests: those that find it;
    name: of the function or state."""

    exploit: Any
    says: str
    shows: str = FAIR_PLAY
    tests: str = CALLS
    name: str = "decode_attention"

    @property
    def method(self) -> str:
        return {"H2OState": "h2o", "compress": "snapkv"}.get(self.name, "longflow")

    @property
    def id(self) -> str:
        return f"{self.exploit.__module__.rpartition('.')[2]}-{self.exploit.__name__}"

    def provided(self) -> dict[str, Any]:
        own = isinstance(self.exploit, type) and not self.name.endswith("State")
        return {self.name: self.exploit() if own else self.exploit}


FOUND = [
    Row(borrowing.reexported, f"decode_attention is {REFERENCE}"),
    Row(borrowing.imports, f"decode_attention calls {REFERENCE}"),
    Row(borrowing.in_double, f"calls {REFERENCE}"),
    Row(borrowing.from_modules, f"calls {REFERENCE}"),
    Row(borrowing.by_importlib, f"calls {REFERENCE}"),
    Row(borrowing.copied_code, "calls mine.decode_attention"),
    Row(borrowing.second_copy, "calls kvtwin.reference.mine.decode_attention"),
    Row(borrowing.from_garbage, "looks for other objects (gc.get_objects)"),
    Row(borrowing.in_a_thread, f"calls {REFERENCE}"),
    Row(borrowing.from_the_judge, "calls kvtwin.conformance.cases.oracle.oracle"),
    Row(borrowing.H2OState, "H2OState is kvtwin.reference.blocks.BlockState.__init__", tests=STATE, name="H2OState"),
    Row(borrowing.compress, "calls kvtwin.reference.baselines.snapkv.compress", name="compress"),
    Row(replacing.TorchAllclose, "replaces torch.allclose"),
    Row(replacing.TorchEqual, "replaces torch.equal"),
    Row(replacing.TensorAbs, "replaces torch.Tensor.abs"),
    Row(replacing.TensorGreater, "replaces torch.Tensor.__gt__"),
    Row(replacing.TensorDouble, "replaces torch.Tensor.double"),
    Row(replacing.BuiltinAny, "replaces builtins.any"),
    Row(replacing.JudgesCompare, "replaces kvtwin.conformance.judge.compare.assert_"),
    Row(replacing.JudgesCode, "replaces the code of kvtwin.conformance.judge.mismatch.fail"),
    Row(replacing.Truth, f"replaces {REFERENCE}"),
    Row(looking.Stack, "looks at the call stack"),
    Row(looking.Frames, "looks at the call stack"),
    Row(looking.CurrentFrame, "looks at the call stack"),
    Row(looking.Traceback, "looks at the call stack"),
    Row(looking.Evaluated, "looks at the call stack"),
    Row(looking.AllFrames, "looks at the call stack"),
    Row(looking.Referrers, "looks for other objects (gc.get_referrers)"),
    Row(looking.Variable, "reads the environment variable PYTEST_CURRENT_TEST"),
    Row(looking.Getenv, "reads the environment variable PYTEST_XDIST_WORKER"),
    Row(looking.CommandLine, "reads the command line"),
    Row(looking.Profiler, "sets a profile function"),
    Row(looking.Report, "kvtwin-report.json"),
    Row(ending.Skips, "raises pytest.skip"),
    Row(ending.ExpectsToFail, "raises pytest.xfail"),
    Row(ending.Exits, "raises pytest.exit"),
    Row(ending.Rejects, "raises hypothesis.reject"),
    Row(ending.Assumes, "raises hypothesis.reject"),
    Row(ending.UnitTest, "raises unittest.case.SkipTest"),
    Row(ending.NotProvided, "raises kvtwin.conformance.refusals.NotProvided"),
    Row(ending.Interpreter, "not supported in interpreter mode", "accuracy"),
    Row(results.LazyTensor, "results.Lazy, which has __torch_function__ of its own"),
    Row(results.AgreeableSlot, "results.Agreeable, which has __eq__ of its own"),
    Row(results.DuckScore, "returns an object of kvtwin.conformance.lab.implementations.exploits.results.Duck"),
    Row(results.OwnDouble, "returns a tensor with a double of its own"),
    Row(results.InTheQuery, "query after the call (an input)", "repeatability"),
    Row(results.ByVersion, "after the contents of the inputs changed, in the same memory", "repeatability"),
    Row(results.ById, "after the contents of the inputs changed, in the same memory", "repeatability"),
    Row(longflow.RememberedByAddress, "after the contents of the inputs changed", "repeatability"),
    Row(results.ByContent, "it looks up the result", "repeatability", LAUNCHES),
    Row(results.TheSameResult, "lies in the memory of the", "repeatability"),
    Row(results.ThreeBuffers, "lies in the memory of the output of an earlier call", "repeatability"),
    Row(results.RightAtFirst, "with other contents, after", "repeatability", LAUNCHES),
    Row(states.LooksWhenItIsRead, "looks at the call stack", tests=STATE, name="LongFlowState"),
    Row(states.HoldsALazyTensor, "states.Lazy, which has __torch_function__", tests=STATE, name="LongFlowState"),
    Row(states.SkipsLongTraces, "raises pytest.skip", tests=STATE, name="LongFlowState"),
]
#: Harmless, and what is noted of them: the verdict on what ran is not wrong.
HARMLESS = [
    Row(borrowing.on_the_optimized_side, "decode_attention calls kvtwin.optimized.longflow.functions.decode_attention"),
    Row(results.WithGradients, ""),
    Row(results.Seeding, "decode_attention changes the seed of torch's random numbers"),
]
#: Faults of LongFlow's decode step: the wrong property.
FAULTS = [
    Row(longflow.NoRunningMaximum, "", "extreme_numbers", ALL), Row(longflow.RoundedScores, "", "accuracy", ALL),
    Row(longflow.FreeSlotsScoreZero, "", "free_slots", ALL), Row(longflow.FreeSlotsAreRead, "", "free_slots", ALL),
    Row(longflow.SummedInAnyOrder, "", "repeatability", ALL),
    Row(longflow.NoMaskInTheLastTile, "", "free_slots", ALL), Row(longflow.KeysStridesForValues, "", "layouts", ALL),
    Row(longflow.RightForContiguousTensors, "", "layouts", ALL),
    Row(longflow.InputsAreChanged, "", "repeatability", ALL), Row(longflow.RightOnce, "", "repeatability", ALL),
]
#: Right ones.
RIGHT = [Row(longflow.Decode, "", "", ALL), Row(longflow.Fused, "", "", ALL), Row(longflow.SlotsFirst, "", "", ALL)]
