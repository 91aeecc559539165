"""The interpreter of a run: the accelerated one, or the plain one, on request or because this Triton is not
supported."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from itertools import chain
from types import ModuleType

import pytest
import torch
import triton

from kvtwin.conformance import interpreter
from kvtwin.conformance.harness import environment
from kvtwin.conformance.interpreter import Prepared, internals

pytest_plugins = ["pytester"]

INTERPRETED = interpreter.interprets(triton.language.standard)
#: Runs in a separate process: prepares the interpreter twice and prints the results.
PREPARE = """
import sys, triton, triton.language as tl
from kvtwin.conformance import interpreter
module = sys.modules.get(interpreter.MODULE)
{before}
first, second = interpreter.prepare(), interpreter.prepare()
assert first is second
print(first)
print("recorded" if hasattr(getattr(module, "_patch_builtin", None), "recordings") else "not recorded")
"""


def prepared(before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != interpreter.VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", PREPARE.format(before=before)], capture_output=True, text=True, check=False,
        env={**kept, "TRITON_INTERPRET": "1", **variables},
    )


@pytest.mark.slow
def test_the_variable_turns_the_accelerator_off():
    ran = prepared(KVTWIN_INTERPRETER="plain")
    assert ran.stdout.splitlines() == ["plain (KVTWIN_INTERPRETER=plain)", "not recorded"], ran.stderr


@pytest.mark.slow
def test_a_difference_in_triton_turns_the_accelerator_off():
    ran = prepared("module._get_np_dtype = lambda tt_dtype: None; module._patch_lang = None")
    line, recorded = ran.stdout.splitlines()
    assert line == (
        f"plain and slow: the accelerator is written for triton {internals.VERSIONS}, and triton {triton.__version__} "
        "differs: _get_np_dtype has another source (and 1 more)"
    ), ran.stderr
    assert recorded == "not recorded"


def test_where_kernels_are_compiled_nothing_is_prepared():
    ran = prepared(TRITON_INTERPRET="0")
    assert ran.stdout.splitlines() == ["None", "not recorded"], ran.stderr


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


def test_a_source_is_known_by_its_text():
    digest = internals.digest
    assert digest(test_a_source_is_known_by_its_text) == digest(test_a_source_is_known_by_its_text)
    assert digest(test_a_source_is_known_by_its_text) != digest(digest)
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
        """Fails for a Triton with other sources than the supported versions. Then verdicts are still right, but
        slow."""
        assert internals.problems(sys.modules[interpreter.MODULE]) == []

    @pytest.mark.parametrize("name", [*internals.PARAMETERS, *internals.SOURCES])
    def test_each_function_that_is_built_otherwise_is_a_problem(monkeypatch, name):
        owner, _, last = name.rpartition(".")
        module = sys.modules[interpreter.MODULE]
        monkeypatch.setattr(internals.lookup(module, owner) if owner else module, last, lambda other: other)
        (problem,) = internals.problems(module)
        assert problem.startswith(f"{name} ")

    @pytest.mark.parametrize(
        ("part", "name"), [(part, name) for part, sources in internals.PARTS.items() for name in sources]
    )
    def test_the_line_names_a_part_with_another_source(monkeypatch, part, name):
        module = sys.modules[interpreter.MODULE]
        assert interpreter.plan(module, "fast") == Prepared("fast", triton.__version__), "all parts must be on"
        owner, _, last = name.rpartition(".")
        monkeypatch.setattr(internals.lookup(module, owner) if owner else module, last, lambda other: other)
        planned = interpreter.plan(module, "fast")
        assert not planned.in_order
        assert environment.interpreter_line(planned) == (
            f"kvtwin interpreter: accelerated in part, without {part}: triton {triton.__version__} differs from "
            f"{internals.VERSIONS} (KVTWIN_INTERPRETER=plain turns this off)"
        )
        assert str(interpreter.plan(module, "plain")) == "plain (KVTWIN_INTERPRETER=plain)"

    def test_what_is_replaced_leads_to_the_original():
        """So `problems` compares Triton's functions, not the replacements of this package."""
        module = sys.modules[interpreter.MODULE]
        for name in chain(internals.SOURCES, *internals.PARTS.values()):
            part = inspect.unwrap(internals.lookup(module, name))
            assert part.__module__.startswith("triton."), name


# --- output of a run ---

#: A conftest.py that makes Triton unsupported before the plugin checks it.
UNKNOWN = "import triton.runtime.interpreter as module\nmodule._patch_lang = lambda fn: None\n"


@pytest.mark.parametrize(
    ("prepared", "line"),
    [
        (Prepared("fast", "3.7.1"), "kvtwin interpreter: accelerated (KVTWIN_INTERPRETER=plain turns this off)"),
        (Prepared("plain", "3.7.1"), "kvtwin interpreter: plain (KVTWIN_INTERPRETER=plain)"),
        (
            Prepared("fast", "4.0", off=("a", "b")),
            "kvtwin interpreter: accelerated in part, without a, b: triton 4.0 differs from 3.6 to 3.9 "
            "(KVTWIN_INTERPRETER=plain turns this off)",
        ),
    ],
)
def test_the_header_says_which_interpreter_runs(prepared, line):
    """test_plugin.py checks the header of a real run."""
    backend = environment.Backend(torch.device("cpu"), True, "Triton interpreter", "no CUDA device")
    assert line in environment.header(backend, "kvtwin.optimized", prepared)
    assert not any("kvtwin interpreter" in said for said in environment.header(backend, "kvtwin.optimized", None))


def test_a_run_with_another_mode_is_a_usage_error(pytester, monkeypatch):
    pytester.makepyfile("def test_passes(): pass")
    monkeypatch.setenv(interpreter.VARIABLE, "off")
    ran = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--kv-device=auto")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines(["ERROR: KVTWIN_INTERPRETER must be 'fast' or 'plain', got 'off'"])


@pytest.mark.slow
def test_an_unknown_triton_is_announced_once(tmp_path, monkeypatch):
    """Not by each process. In a quiet run, which has no header, it is announced at the end."""
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    for name in ("CI", "PYTEST_ADDOPTS", interpreter.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "test_it.py").write_text("def test_passes(): pass\n")
    (tmp_path / "conftest.py").write_text(UNKNOWN)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--kv-device=cpu", "-q", "-n1"], cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    (line,) = [said for said in (ran.stdout + ran.stderr).splitlines() if said.startswith("kvtwin interpreter:")]
    assert line.endswith(f"triton {triton.__version__} differs: _patch_lang has another source")
    assert ran.returncode == 0
