"""What the verdict shows of a failed test: its case, and a command that repeats the failure as it is printed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvtwin.conformance import capabilities
from kvtwin.conformance.cases import case as cases
from kvtwin.conformance.cases import failures, saved
from kvtwin.conformance.harness import power, verdict_table
from kvtwin.conformance.judge import attribution, bounds, compare, subjects
from kvtwin.conformance.lab.implementations.run import verdict_of
from kvtwin.reference import longflow as reference

MODULE = """
from kvtwin.conformance import Capabilities
from kvtwin.conformance.lab.implementations.longflow import Decode
from kvtwin.conformance.lab.implementations.longflow_states import IgnoresReorder as LongFlowState

CAPABILITIES = Capabilities(validates_arguments=False, protected=False, groups=(2,))

def decode_attention(query, key, value, occupied, **options):
    if key.shape[2] > 2:
        raise RuntimeError("no room for a third slot")
    return Decode()(query, key, value, occupied, **options)
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    package = tmp_path / "their_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "longflow.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


def findings(folder: Path, keyword: str) -> list[dict[str, Any]]:
    ran = run(
        folder, "kvtwin.conformance", "longflow", "--impl=their_kernels", "--device=cpu", "--jobs=1", "-k", keyword,
        "--report=report.json",
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout + ran.stderr
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return [test["finding"] for test in report["tests"] if test["outcome"] == "failed"]


@pytest.mark.slow
def test_the_case_in_which_an_implementation_raises_is_saved(theirs):
    (found,) = findings(theirs, "numbers_are_within and attention-output")
    assert found["error"] == "RuntimeError"
    assert found["message"].startswith("RuntimeError: no room for a third slot\n  raised in ")
    assert "slots=3" in found["case"]
    command, *arguments = shlex.split(found["replay"])
    assert (command, arguments[0]) == ("kvtwin", "replay")
    again = run(theirs, "kvtwin.conformance.cli", *arguments)
    assert again.returncode == 1, again.stdout + again.stderr
    assert found["case"] in again.stdout
    assert "  longflow.decode_attention.output: RuntimeError: no room for a third slot\n" in again.stdout


@pytest.mark.slow
def test_a_failure_without_a_case_has_the_command_that_runs_its_test(theirs):
    """As a law: the command is to work as it is printed, quotes included."""
    found = findings(theirs, "reordered_rows and not per_head")
    assert found
    assert {one["case"] for one in found} == {None}
    command, *arguments = shlex.split(found[0]["replay"])
    assert (command, arguments[:3]) == ("python", ["-m", "pytest", "--pyargs"])
    assert "test_laws::test_reordered_rows_go_on_as_their_sources[optimized-longflow" in arguments[3]
    again = run(theirs, *arguments[1:])
    assert again.returncode == 1, again.stdout + again.stderr
    assert "1 failed" in again.stdout and "reordered" in again.stdout


def test_the_search_for_a_cause_does_not_replace_the_saved_case(tmp_path, monkeypatch):
    """It judges other cases, which fail too."""
    monkeypatch.setenv(failures.FOLDER, str(tmp_path))

    def decode_attention(**inputs: Any) -> reference.DecodeResult:
        right = reference.decode_attention(**inputs)
        return right._replace(slot=(right.slot + 1) % inputs["key"].shape[2])

    module = types.SimpleNamespace(decode_attention=decode_attention)
    subject = next(one for one in subjects.every() if str(one) == "longflow.decode_attention")
    case = cases.DecodeCase(slots=7, batch=4, seed=1)
    with pytest.raises(AssertionError):
        subject.check(module, case, "slot")
    (path,) = tmp_path.iterdir()
    assert repr(saved.load(path)) == repr(case)
    assert attribution.property_of(subject, "slot", case, module, "decisions") == "decisions"
    assert repr(saved.load(path)) == repr(case)


@pytest.mark.parametrize("error", [OSError("read-only"), RuntimeError("CUDA error: an illegal memory access")])
def test_a_case_that_cannot_be_saved_does_not_hide_the_failure(error, tmp_path, monkeypatch):
    monkeypatch.setenv(failures.FOLDER, str(tmp_path))
    case = cases.DecodeCase(slots=7)
    case.used()
    monkeypatch.setattr(type(case), "save", mock.Mock(side_effect=error))
    assert repr(cases.latest()) == repr(case)
    assert failures.save_latest() == f"(not saved: {error})"


def blamed(case, fails, own="decisions", wrong=None):
    """The property to which a failure of the decode step's slot is attributed, if `fails` says which cases fail."""
    function = next(one for one in subjects.every() if str(one) == "longflow.decode_attention")

    def check(module, variant, name):
        if fails(variant):
            compare.fail("wrong")

    subject = types.SimpleNamespace(choices=function.choices, properties=function.properties, check=check)
    return attribution.property_of(subject, "slot", case, None, own, wrong=wrong)


@pytest.mark.parametrize(("fails", "own", "wrong", "expected"), [
    (lambda case: True, "free_slots", None, "decisions"),
    (lambda case: case.occupancy != "full", "free_slots", None, "free_slots"),
    # One of 21 ordinary cases fails: that does not explain cases with free slots, all of which fail,
    (lambda case: case.occupancy != "full" or (case.seed, case.slots) == (3, 5), "free_slots", None, "free_slots"),
    (lambda case: (case.seed, case.slots) == (3, 5), "free_slots", None, "decisions"),  # but those that fail as rarely.
    (lambda case: case.batch > 1, "decisions", 40, "independence"),
    (lambda case: case.batch > 1, "decisions", 2, "decisions"),  # in few of 64 rows: one alone is right by chance
    # Rare in 64 rows: as rare as in one row, of which 21 cases need not show it.
    (lambda case: case.batch > 1 and case.slots > 100, "decisions", None, "decisions"),
    (lambda case: case.batch > 1 and case.slots > 100, "independence", None, "independence"),
    # Some single rows fail, too.
    (lambda case: case.batch > 1 or (case.seed, case.slots) == (3, 5), "decisions", None, "decisions"),
])
def test_a_failure_belongs_to_what_makes_it_frequent(fails, own, wrong, expected):
    case = cases.DecodeCase(batch=64, slots=640, occupancy="random", seed=7)
    assert blamed(case, fails, own, wrong) == expected


def test_blame_stays_inside_of_what_is_declared():
    seen = []
    with capabilities.use(capabilities.Capabilities(kv_heads=(2, 4), groups=(3,), slots_multiple_of=4, max_slots=8)):
        blamed(cases.DecodeCase(key_value_heads=4, group=3, slots=8), seen.append, "layouts")
    assert {(one.key_value_heads, one.group) for one in seen} == {(2, 3), (4, 3)}
    assert {one.slots for one in seen} == {8}


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_checker_that_the_reference_fails_is_blamed(tmp_path, monkeypatch, scale):
    right = bounds.decode_output
    monkeypatch.setattr(bounds, "decode_output", lambda *args, **options: scale * right(*args, **options))

    def decode_attention(*args: Any, **options: Any) -> Any:
        found = reference.decode_attention(*args, **options)
        return found._replace(output=found.output * (1 if scale == 0 else 1.5))

    keyword = "test_numbers_are_within_their_bounds and decode_attention-output and not fp8"
    found = verdict_of("longflow", {"decode_attention": decode_attention}, {}, keyword, tmp_path, monkeypatch)
    text = "\n".join(line for line, _ in verdict_table.lines(found, "theirs"))
    assert found.properties["accuracy"].verdict == "wrong"
    assert (power.BLAMES_US in text) == (scale == 0.0)
