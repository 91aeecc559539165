"""The judge, for tests of your own: cases, float64 attention, derived error bounds, comparisons, lockstep.

What `__all__` names is public: docs/explanation/versions.md says what that promises. Everything else below
`kvtwin.conformance` may change in any release. docs/how-to/own-tests.md shows how to use it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import interpreter
from .capabilities import Capabilities
from .cases.block_cases import AttendCase, attend_cases
from .cases.case import Case, DecodeCase, WindowCase
from .cases.flashinfer_traces import flashinfer_cases
from .cases.in_pages import PagedDecodeCase, PagedFp8Case, paged_decode_cases, paged_fp8_cases
from .cases.key_cases import KeyCase, key_cases
from .cases.oracle import Attention, attend, upcast
from .cases.paged_view import PagedLayout, PagedView, paged_views
from .cases.saved import load
from .cases.state_trace import StateTrace
from .cases.strategies import decode_cases, state_traces, window_cases
from .discovery import OPTIMIZED
from .harness import replay
from .harness.fair_play import Guard
from .harness.impl import Facade
from .judge import lockstep as _lockstep
from .judge.bounds import Arithmetic, Interval, arithmetic, gamma, log_weight_error, output_error
from .judge.choices import Verdict, assert_eviction_right, assert_kept_right
from .judge.compare import (
    JudgeError,
    Mismatch,
    assert_dtype,
    assert_same,
    assert_within,
)
from .judge.fields import field
from .judge.lockstep import Lockstep, Summary
from .judge.paged_subjects import paged_subjects
from .judge.pages import judge_paged
from .judge.ties import tie_classes
from .refusals import NotProvided
from .stats import Stats, collect

__all__ = [
    "Arithmetic", "AttendCase", "Attention", "Capabilities", "Case", "DecodeCase", "Interval", "JudgeError", "KeyCase",
    "Lockstep", "Mismatch", "NotProvided", "PagedDecodeCase", "PagedFp8Case", "PagedLayout", "PagedView", "StateTrace",
    "Stats", "Summary", "Verdict", "WindowCase", "arithmetic", "assert_dtype", "assert_eviction_right",
    "assert_kept_right", "assert_same", "assert_within", "attend", "attend_cases", "collect", "decode_cases", "field",
    "flashinfer_cases", "gamma", "judge", "judge_paged", "key_cases", "load", "lockstep", "log_weight_error",
    "output_error", "paged_decode_cases", "paged_fp8_cases", "paged_subjects", "paged_views", "state_traces",
    "tie_classes", "upcast", "use_interpreter", "window_cases",
]


def use_interpreter() -> str:
    """Run Triton kernels on the CPU in this process, with results that do not depend on the CPU. Call it before triton
    is imported. Returns a line that says how the kernels run.

    Raises RuntimeError if triton is missing or was imported for a GPU, and ValueError for another KVTWIN_INTERPRETER
    than fast and plain.
    """
    interpreter.turn_on()
    prepared = interpreter.prepare()
    if prepared is None:
        raise RuntimeError(
            "triton must be installed, and must not be imported before use_interpreter() unless TRITON_INTERPRET=1 is "
            "set: kernels that were made for a GPU cannot be interpreted"
        )
    return str(prepared)


def judge(case: Case, implementation: Any) -> list[str]:
    """Judge a case with every check that applies to it. Returns a line per check that passed.

    implementation: a module as for ``--kv-impl``, whose attributes, such as `longflow`, are the methods' modules.
    Raises Mismatch if a result is wrong, NotProvided if the implementation lacks the function, and ValueError if no
    check applies to the case.
    """
    if not isinstance(case, Case):
        raise TypeError(f"case must be a Case, got {type(case).__name__}")
    name = getattr(implementation, "__name__", type(implementation).__name__)
    # In tests of one's own, functions around those of kvtwin deceive nobody.
    passed = list(replay.judge_case(case, Facade(name, implementation, guard=Guard(OPTIMIZED))))
    if not passed:
        raise ValueError(f"case must be of a kind that a method's checker judges, got {type(case).__name__}")
    return passed


def lockstep(trace: StateTrace, tested: ModuleType) -> Summary:
    """Feed a trace to the state under test and to the reference in float64, and compare them after every step.

    trace: for example from `state_traces`, or ``StateTrace(method="longflow", config=(("budget", 8),), prompt=20,
    steps=10)``. tested: a module with the method's state, such as `LongFlowState`. Raises Mismatch at the first
    difference beyond the bounds. Returns the numbers of steps, of decisive choices and of adjudicated ties.
    """
    if not isinstance(trace, StateTrace):
        raise TypeError(f"trace must be a StateTrace, got {type(trace).__name__}")
    return _lockstep.run(trace, tested)
