"""Reports of runs that did not take place, for the tests of the report and of its page."""

from __future__ import annotations

from typing import Any

from kvtwin.conformance import Capabilities
from kvtwin.conformance.harness import environment, verdict
from kvtwin.conformance.harness.report import build_report
from kvtwin.conformance.harness.results import Result
from kvtwin.conformance.judge.properties import PROPERTIES
from kvtwin.conformance.stats import JudgedCase

#: A text that sets the title of the page, if the page does not escape it.
HOSTILE = "</script></title></svg><script>document.title='it ran'</script>" + (
    "<img src=x onerror=\"document.title='it ran'\"><b>&amp;' onmouseover='document.title=\"it ran\"' {$title}"
)
LONG = "a_long_name_without_a_space_" * 12
METHODS = ("longflow", "keydiff", "tova", "h2o")
WRONG = ("accuracy", "decisions", "extreme_numbers")


def passed(count: int) -> list[Result]:
    """Passed tests of every property and several methods, in 40 files."""
    names, dtypes = list(PROPERTIES), ("float32", "float16", "bfloat16")
    return [
        Result(
            f"suite/test_file_{number % 40}.py::test_it[{METHODS[number % 4]}.decode_attention-output-{number}]",
            method=METHODS[number % 4], kind="equivalence", duration=0.01, touched=True, answered=3, cases=3,
            judged={f"{number}": JudgedCase(dtypes[number % 3], "contiguous", 2, 48, 19)}, elements=1000, launches=3,
            judges=names[number % 11], subject=f"{METHODS[number % 4]}.decode_attention", judged_field="output",
            worst={dtypes[number % 3]: 10.0 ** (-number % 7 - 6)},
            decisions=20, decisive=19, utilisation=0.01, shapes={f"{'DGS'[number % 3]} {4 ** (number % 5)}": 0.01},
            drift={str(step): 0.001 * (1 + step) for step in range(3)} if names[number % 11] == "traces" else {},
        )
        for number in range(count)
    ]


def failed(text: str, count: int = 1) -> list[Result]:
    """Failed tests of LongFlow. text is part of everything that a test or an implementation names."""
    found = []
    for number, judged in enumerate(WRONG * count):
        message = f"{text}: 16 of 16 elements are beyond their bound\n  error 1, bound 1e-8: 1e+08 times the bound"
        finding = {
            "property": judged, "subject": f"longflow.{text}", "field": text, "error": "Mismatch", "message": message,
            "of_bound": 1e8 if number % 2 else float("inf"), "dtype": "float16",
            "unbounded": None if number % 2 else "NaN", "case": f"DecodeCase({text!r})",
            "sizes": ["D 16", "S 4"],
            "replay": f"kvtwin replay {text}.safetensors --impl theirs --device cpu",
            "choice": False, "wrong": 1, "unusual": False,
        }
        found.append(Result(
            f"suite/test_failed.py::test_{judged}[{number}-{text}]", method="longflow", kind="equivalence",
            outcome="failed", judges=judged, judged_field=text, touched=True, answered=1, cases=1,
            refused={f"decode_attention: {text}": 2}, missing={f"decode_attention.{text}": 1}, finding=finding,
            message=message + "\n" + 200 * "a line of a failing example\n",
        ))
    return found


def other(text: str) -> list[Result]:
    """Tests with other outcomes, and failed ones that judge no property."""
    return [
        Result(f"test_n.py::test_n[{text}]", method="longflow", kind="laws", outcome="not provided", judges="state",
               message=f"not provided: theirs.{text}"),
        Result(f"test_e.py::test_e[{text}]", method="tova", kind="laws", outcome="environment", judges="layouts",
               message=f"the interpreter cannot run {text}"),
        Result(f"test_s.py::test_s[{text}]", outcome="skipped", message=text),
        Result(f"test_x.py::test_x[{text}]", method="h2o", kind="golden", outcome="xfailed", judges="traces",
               touched=True, message=text),
        Result(f"test_c.py::test_c[{text}]", method="longflow", kind="claims", claims=("LF-3a",), message=""),
        Result(f"test_o.py::test_o[{text}]", method="longflow", kind="claims", claims=("LF-4a",), outcome="error",
               touched=True, message=f"\x00\x1b[31m\ud800 {text}"),
    ]  # fmt: skip


def sample(found: list[Result], *, implementation: str | None = "json", text: str = "shape") -> dict[str, Any]:
    """A report of these results. implementation: any module; None: kvtwin's own."""
    import torch

    judged = verdicts(found, own=implementation is None, text=text)
    made = build_report(
        found, judged, backend=environment.Backend(torch.device("cpu"), True, "Triton interpreter", "as asked"),
        implementation=implementation, arguments=["--kv-impl", text], exit_status=verdict.exit_status(judged),
    )
    return made if implementation is None else {**made, "accuracy": accuracy(text)}


def verdicts(found: list[Result], *, own: bool = False, text: str = "shape") -> dict[str, verdict.MethodVerdict]:
    declared = Capabilities(dtypes=("float16",), ties="any", options={text: (text,)})
    return verdict.judge(found, dict.fromkeys(METHODS, declared), device="cpu", own=own)


def accuracy(text: str) -> list[dict[str, Any]]:
    """What --accuracy adds: one row with answers, and one with an error."""
    answers = {"accuracy": 0.75, "standard_error": None, "right": 3, "queries": 4, "documents": 1}
    return [
        {"method": text, "through": text, "budget": 8, "share": 0.5, "reference": {text: answers}, "tested": tested,
         "why": why}
        for tested, why in (({text: {**answers, "standard_error": 0.125}}, ""), ({}, text))
    ]  # fmt: skip
