"""Which interpreter a run uses: the accelerated one, or the plain one, asked for or because Triton is not known."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import ModuleType

import pytest
import triton

from kvtwin.conformance import interpreter
from kvtwin.conformance.cases import DecodeCase
from kvtwin.conformance.interpreter import Prepared, internals

INTERPRETED = interpreter.interprets(triton.language.standard)
#: Runs in a process of its own: prepares the interpreter twice and prints what came of it.
PREPARE = """
import sys, triton, triton.language as tl
from kvtwin.conformance import interpreter
module = sys.modules.get(interpreter.MODULE)
{before}
first, second = interpreter.prepare(), interpreter.prepare()
assert first is second
print(first)
print("taped" if hasattr(getattr(module, "_patch_builtin", None), "tapes") else "not taped")
"""


def prepared(before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != interpreter.VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", PREPARE.format(before=before)], capture_output=True, text=True, check=False,
        env={**kept, "TRITON_INTERPRET": "1", **variables},
    )


def test_the_accelerator_is_on_by_default():
    ran = prepared()
    assert ran.stdout.splitlines() == ["accelerated (KVTWIN_INTERPRETER=plain turns this off)", "taped"], ran.stderr


def test_the_variable_turns_the_accelerator_off():
    ran = prepared(KVTWIN_INTERPRETER="plain")
    assert ran.stdout.splitlines() == ["plain (KVTWIN_INTERPRETER=plain)", "not taped"], ran.stderr


def test_a_difference_in_triton_turns_the_accelerator_off():
    ran = prepared("module._get_np_dtype = lambda tt_dtype: None; module._patch_lang = None")
    line, taped = ran.stdout.splitlines()
    assert line == (
        f"plain and slow: the accelerator is written for triton {internals.VERSIONS}, and triton {triton.__version__} "
        "differs: _get_np_dtype has another source (and 1 more)"
    ), ran.stderr
    assert taped == "not taped"


def test_where_kernels_are_compiled_nothing_is_prepared():
    ran = prepared(TRITON_INTERPRET="0")
    assert ran.stdout.splitlines() == ["None", "not taped"], ran.stderr


def test_without_the_interpreter_triton_is_not_imported():
    code = "import sys; from kvtwin.conformance.interpreter import prepare; print(prepare(), 'triton' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert ran.stdout == "None False\n"


@pytest.mark.parametrize("asked", ["", "Plain", "slow"])
def test_another_mode_is_refused_with_what_is_accepted(monkeypatch, asked):
    monkeypatch.setenv(interpreter.VARIABLE, asked)
    with pytest.raises(ValueError) as caught:
        interpreter.prepare()
    assert str(caught.value) == f"KVTWIN_INTERPRETER must be 'fast' or 'plain', got {asked!r}"


def test_a_source_is_known_by_what_it_says():
    digest = internals.digest
    assert digest(test_a_source_is_known_by_what_it_says) == digest(test_a_source_is_known_by_what_it_says)
    assert digest(test_a_source_is_known_by_what_it_says) != digest(digest)
    assert digest(None) is None
    assert digest(len) is None


def test_an_interpreter_that_lacks_everything_has_a_problem_with_everything():
    found = internals.problems(ModuleType("empty"))
    assert len(found) == len(internals.NAMES) + len(internals.PARAMETERS) + len(internals.SOURCES)
    assert "there is no interpreter_builder" in found
    assert "there is no _patch_lang" in found
    assert "_patch_lang_tensor takes None, not ['tensor', 'scope']" in found


def test_the_line_says_how_many_problems_there_are():
    assert str(Prepared("fast", "4.0", ("a", "b", "c"))).endswith("triton 4.0 differs: a (and 2 more)")
    assert str(Prepared("fast", "4.0", ("a",))).endswith("triton 4.0 differs: a")


if INTERPRETED:

    def test_this_triton_is_known():
        """Fails where Triton is built otherwise than the versions that were read: verdicts are right then, and slow."""
        assert internals.problems(sys.modules[interpreter.MODULE]) == []

    @pytest.mark.parametrize("name", [*internals.PARAMETERS, *internals.SOURCES])
    def test_each_function_that_is_built_otherwise_is_a_problem(monkeypatch, name):
        owner, _, last = name.rpartition(".")
        module = sys.modules[interpreter.MODULE]
        monkeypatch.setattr(internals.lookup(module, owner) if owner else module, last, lambda other: other)
        (problem,) = internals.problems(module)
        assert problem.startswith(f"{name} ")

    def test_what_is_replaced_leads_to_the_original():
        """So that `problems` judges Triton, and not this package."""
        module = sys.modules[interpreter.MODULE]
        for name in internals.SOURCES:
            part = inspect.unwrap(internals.lookup(module, name))
            assert part.__module__.startswith("triton."), name


# --- what a run says ---

PASSING = "def test_passes(): pass\n"
#: A conftest.py that makes Triton unknown before the plugin sees it.
UNKNOWN = "import triton.runtime.interpreter as module\nmodule._patch_lang = lambda fn: None\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run pytest on a passing test on the CPU; what it prints, and the lines of it about the interpreter."""
    for name in ("CI", "PYTEST_ADDOPTS", interpreter.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "test_it.py").write_text(PASSING)

    def pytest_on_it(*arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--kv-device=cpu", *arguments],
            cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1", **variables}, capture_output=True, text=True,
            check=False,
        )
        said = (ran.stdout + ran.stderr).splitlines()
        return ran, [line for line in said if line.startswith("kvtwin interpreter:")]

    pytest_on_it.folder = tmp_path
    return pytest_on_it


def test_the_header_says_which_interpreter_runs(run):
    """Of the accelerated one, test_plugin.py sees the line."""
    assert run(KVTWIN_INTERPRETER="plain")[1] == ["kvtwin interpreter: plain (KVTWIN_INTERPRETER=plain)"]


def test_a_run_with_another_mode_is_a_usage_error(run):
    ran, _ = run(KVTWIN_INTERPRETER="off")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: KVTWIN_INTERPRETER must be 'fast' or 'plain', got 'off'" in ran.stderr


@pytest.mark.parametrize("arguments", [(), ("-q", "-n1")], ids=" ".join)
def test_an_unknown_triton_is_announced_once(run, arguments):
    """In the header, or at the end of a quiet run; not by each process."""
    if "-n1" in arguments:
        pytest.importorskip("xdist", reason="needs pytest-xdist")
    (run.folder / "conftest.py").write_text(UNKNOWN)
    ran, (line,) = run(*arguments)
    assert line.endswith(f"triton {triton.__version__} differs: _patch_lang has another source")
    assert ran.returncode == 0


def test_a_replay_prepares_the_interpreter_too(tmp_path):
    file = tmp_path / "case.safetensors"
    DecodeCase(batch=1, slots=6).save(file)
    code = (
        f"import sys; from kvtwin.conformance import interpreter, replay; status = replay.main([{str(file)!r}, "
        "'--device', 'cpu']); print(sys.modules[interpreter.MODULE]._kvtwin); sys.exit(status)"
    )
    kept = {name: value for name, value in os.environ.items() if name != interpreter.VARIABLE}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=kept)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "accelerated (KVTWIN_INTERPRETER=plain turns this off)"
