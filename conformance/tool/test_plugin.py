"""The plugin in separate runs: options, backend, vacuous tests, projects of other people.

Runs that import the optimized side, or depend on the environment, are separate processes. The others run in this
process, with the reference only and with this run's Hypothesis profile, which they would otherwise change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtwin.conformance import __main__ as main_job
from kvtwin.conformance import interpreter, plugin
from kvtwin.conformance.harness import environment, order, results, suite, verdict

pytest_plugins = ["pytester"]

PASSING = "def test_passes(twins): assert twins.reference.longflow.LongFlowConfig(budget=4).budget == 4"


@pytest.fixture
def python(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run Python in the test's folder, with an environment without variables of Triton or CI."""
    for name in (interpreter.INTERPRET, interpreter.VARIABLE, "CI", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, timeout=100, check=False)

    return run


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


# --- projects of other people ---


def test_loading_the_plugin_imports_nothing_heavy(python):
    """Every pytest run in an environment with kvtwin installed pays for this import."""
    heavy = {"torch", "triton", "hypothesis", "numpy", "transformers", "safetensors"}
    code = f"import sys, kvtwin.conformance.plugin; print(sorted({heavy!r} & set(sys.modules)))"
    assert python("-c", code).stdout.strip() == "[]"


def test_runs_of_other_projects_do_not_change(pytester, python):
    write(
        pytester.path,
        test_mine="""
            import os, sys
            def test_mine(request):
                assert "TRITON_INTERPRET" not in os.environ
                assert not {"torch", "triton", "hypothesis"} & set(sys.modules)
                assert "kind" not in str(request.config.getini("markers"))
            def test_no_fixture_of_ours(request):
                manager = request.session._fixturemanager
                assert not manager.getfixturedefs("twins", request.node)
                assert not manager.getfixturedefs("device", request.node)
        """.replace("\n            ", "\n"),
    )
    ran = python("-m", "pytest", "-p", "no:benchmark", "-p", "no:anyio")
    assert "2 passed" in ran.stdout, ran.stdout
    assert not [line for line in ran.stdout.splitlines() if line.startswith("kvtwin")]  # no header, no summary


HERE = plugin.HERE


@pytest.mark.parametrize(
    ("argument", "pyargs", "included"),
    [
        (str(HERE), False, True),
        (str(HERE / "tool" / "test_plugin.py"), False, True),
        (f"{HERE / 'tool' / 'test_plugin.py'}::test_name[a/b]", False, True),
        (str(HERE.parent), False, True),
        ("kvtwin.conformance", True, True),
        ("kvtwin.conformance.tool.test_plugin::test_name", True, True),
        ("kvtwin", True, True),
        ("kvtwin.conformance", False, False),
        ("kvtwin.conformances", True, False),
        ("numpy", True, False),
        ("tests", False, False),
        (f"{HERE}-other", False, False),
    ],
)
def test_which_arguments_include_our_tests(argument, pyargs, included, tmp_path):
    config = SimpleNamespace(invocation_params=SimpleNamespace(dir=tmp_path), getoption=lambda name: pyargs)
    assert plugin._names_own_tests(config, argument) is included


def test_projects_that_contain_our_environment_do_not_change(monkeypatch, tmp_path):
    """pytest does not collect from .venv, so a run on the root of such a project runs none of our tests."""
    config = SimpleNamespace(invocation_params=SimpleNamespace(dir=tmp_path), getoption=lambda name: False)
    installed = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "kvtwin" / "conformance"
    monkeypatch.setattr(plugin, "HERE", installed)
    assert not plugin._names_own_tests(config, str(tmp_path))
    assert plugin._names_own_tests(config, str(installed))


def test_every_way_to_select_our_tests_activates_the_plugin(pytester, in_process):
    """Even if a conftest brings them in, which the command line does not show."""
    path = HERE / "tool" / "test_ledger.py"
    pytester.makeconftest(
        f"""
        def pytest_configure(config): config.args[:] = [{str(path)!r}]
        def pytest_sessionfinish(session): print("awake:", session.config.pluginmanager.has_plugin({plugin.SUITE!r}))
        """
    )
    result = in_process("-k", "test_load", active=False)
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines(["*awake: True*"])


def test_tests_of_another_copy_are_refused(pytester, in_process):
    pytester.makeconftest((HERE / "conftest.py").read_text())
    pytester.makepyfile(PASSING)
    result = in_process()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: the tests in {pytester.path} would test the kvtwin * {HERE.parent}; *"])


def test_without_the_plugin_our_tests_say_so(pytester):
    alone = ("-c", os.devnull, f"--rootdir={HERE}", "-p", "no:cacheprovider")  # without our settings, which are strict
    result = pytester.runpytest_inprocess(*alone, "-p", "no:kvtwin", str(HERE / "tool" / "test_ledger.py"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: these tests need kvtwin's pytest plugin, *"])


# --- backend ---


def test_header_names_device_versions_and_what_is_tested(pytester, in_process):
    torch = metadata.version("torch")
    pytester.makepyfile(PASSING)
    result = in_process()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            f"kvtwin: kvtwin *, python 3.*, torch {torch}, triton *, hypothesis *",
            "kvtwin device: c* (*), *",
            "kvtwin under test: kvtwin.optimized",
        ]
    )


@pytest.mark.slow
def test_without_cuda_the_interpreter_is_on_before_triton_is_imported(pytester, python):
    write(
        pytester.path,
        test_it="""
import triton, triton.language as tl
def test_it(device):
    assert device.type == "cpu"
    assert type(tl.cdiv).__name__ == "InterpretedFunction"
""",
    )
    ran = python("-m", "pytest", "--kv-device", "auto", CUDA_VISIBLE_DEVICES="")
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "kvtwin device: cpu (Triton interpreter), no CUDA device, TRITON_INTERPRET=1" in ran.stdout
    assert "kvtwin interpreter: accelerated (KVTWIN_INTERPRETER=plain turns this off)" in ran.stdout


@pytest.mark.slow
def test_triton_imported_too_early_stops_the_run(pytester, python):
    write(pytester.path, conftest="import triton", test_it=PASSING)
    ran = python("-m", "pytest", "--kv-device", "cpu")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "kvtwin needs triton imported with TRITON_INTERPRET=1" in ran.stderr
    assert "conftest.py" in ran.stderr  # the possible cause, and what to do
    assert "set TRITON_INTERPRET=1 in the environment" in ran.stderr


@pytest.mark.slow
def test_triton_imported_early_but_interpreted_is_fine(pytester, python):
    write(pytester.path, conftest="import triton", test_it=PASSING)
    ran = python("-m", "pytest", "--kv-device", "cpu", TRITON_INTERPRET="1")
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
def test_cuda_without_cuda_is_an_error_not_a_skip(pytester, python):
    write(pytester.path, test_it=PASSING)
    ran = python("-m", "pytest", "--kv-device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--kv-device cuda, but torch" in ran.stderr
    assert "sees no CUDA device" in ran.stderr


@pytest.mark.slow
def test_cuda_with_the_interpreter_is_an_error(pytester, python):
    write(pytester.path, test_it=PASSING)
    ran = python("-m", "pytest", "--kv-device", "cuda", TRITON_INTERPRET="1")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--kv-device cuda, but TRITON_INTERPRET=1 is set" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "ci", "profile"),
    [([], "", "default"), ([], "true", "ci"), (["--hypothesis-profile", "thorough"], "true", "thorough")],
)
def test_hypothesis_profile(pytester, monkeypatch, arguments, ci, profile):
    """Tests set_up_hypothesis directly, because a whole run would leave its profile in this process."""
    loaded, registered = [], []
    config = pytester.parseconfig(*arguments)
    fake = SimpleNamespace(load_profile=loaded.append, register_profile=lambda name, **values: registered.append(name))
    monkeypatch.setattr("hypothesis.settings", fake)
    monkeypatch.setenv("CI", ci)
    environment.set_up_hypothesis(config)
    assert set(registered) == {"quick", "brief", "ci", "gpu", "default", "thorough", "soak"}
    assert loaded == ([] if arguments else [profile])  # Hypothesis's own plugin loads the profile that its option names


# --- vacuous tests ---

RECORDED = """
import pytest
from hypothesis import example, given, strategies
from kvtwin.conformance import stats

@pytest.mark.parametrize("decisive", [{decisive}])
def test_decisions(twins, decisive):
    stats.decisions(10, decisive)

@given(strategies.sampled_from([0, {decisive}, 10]))
@example({decisive})
def test_over_all_examples(twins, decisive):
    stats.decisions(10 if decisive == {decisive} else 0, min(decisive, 10 if decisive == {decisive} else 0))
"""


@pytest.mark.parametrize(("decisive", "outcome"), [(4, {"failed": 2}), (5, {"passed": 2})])
def test_a_test_that_decides_less_than_half_is_vacuous(pytester, in_process, decisive, outcome):
    pytester.makepyfile(RECORDED.format(decisive=decisive))
    result = in_process()
    result.assert_outcomes(**outcome)
    if "failed" in outcome:
        result.stdout.fnmatch_lines(["vacuous: 4 of 10 decisions were decisive (40%)*"])


def test_a_failure_is_not_hidden_behind_vacuity(pytester, in_process):
    pytester.makepyfile(
        """
        from kvtwin.conformance import stats
        def test_wrong(twins):
            stats.decisions(10, 0)
            assert "the eviction" == "wrong"
        """
    )
    result = in_process()
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*vacuous*")
    result.stdout.no_fnmatch_line("*draws.py*")  # a traceback must not include the caller of the test


# --- python -m kvtwin.conformance ---


@pytest.mark.parametrize("method", ["longflow"])
def test_the_suites_own_tests_verify_no_method(method, request):
    """The main job leaves their folder out, so no method's verdict may count them."""
    assert results.classify(request.node)["method"] is None


def test_the_main_job_knows_its_methods(capsys):
    with pytest.raises(SystemExit) as stopped:
        main_job.main(["longflow", "nonsense"])
    assert stopped.value.code == 2
    assert "no method 'nonsense'; there are: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_main_job_that_verifies_nothing_fails(pytester, python):
    """With an implementation that refuses all calls, all tests are skipped, which pytest counts as success."""
    refuses = "def decode_attention(*args, **options):\n        raise NotImplementedError"
    write(pytester.path, empty=f"class longflow:\n    {refuses}\n")
    one = "test_choices_are_right"
    ran = python("-m", "kvtwin.conformance", "longflow", "--impl=empty", "--device=cpu", "-j1", "-k", one)
    assert "kvtwin under test: empty (" in ran.stdout
    assert ran.returncode == verdict.EXIT_NOT_COVERED, ran.stdout + ran.stderr
    assert "longflow of empty: NOT COVERED" in ran.stdout
    report = json.loads(pytester.path.joinpath("kvtwin-report.json").read_text())
    assert report["totals"]["not_provided"] > 0
    assert {test["method"] for test in report["tests"]} == {"longflow"}
    assert pytester.path.joinpath("kvtwin-report.html").is_file()


def test_update_golden_runs_the_recorder(pytester, in_process, monkeypatch):
    """The option calls the script. Nothing else may write a golden trace."""
    ran = []
    pytester.makepyfile(PASSING)
    fake = SimpleNamespace(run=lambda command, check: ran.append(command) or SimpleNamespace(returncode=0))
    monkeypatch.setattr(suite, "subprocess", fake)
    in_process("--kv-update-golden").assert_outcomes(passed=1)
    assert [command[1:] for command in ran] == [["-m", "kvtwin.fixtures.record"]]


@pytest.mark.parametrize(("count", "long", "workers", "begins"), [
    (11, [[4], [5], [6]], 3, [[4], [5], [6]]), (10, [], 2, [[], []]), (7, [[6]], 4, [[6], [], [], []]),
    (12, [[4, 5], [9], [6, 7]], 2, [[4, 5, 6, 7], [9]]), (7, [[0, 2], [1, 3, 4]], 2, [[0, 2], [1, 3, 4]]),
])
def test_processes_begin_with_groups_of_what_takes_longest(count, long, workers, begins):
    ordered = order.longest_first(list(range(count)), long, workers)
    assert sorted(ordered) == list(range(count))
    parts = []
    for left in range(workers, 0, -1):                                    # as pytest-xdist's worksteal does
        parts.append(ordered[:len(ordered) // left])
        ordered = ordered[len(ordered) // left:]
    assert [part[:len(begin)] for part, begin in zip(parts, begins, strict=True)] == begins
    apart = {number for group in long for number in group}
    assert all(not apart & set(part[len(begin):]) for part, begin in zip(parts, begins, strict=True))


def test_what_takes_longest_comes_first_among_the_tests_that_remain(pytester, in_process, monkeypatch):
    """pytest-xdist gives the second of two processes the second half of the tests that are not deselected."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    others = "".join(f"def test_{n}{'_out' if n < 5 else ''}(twins): pass\n" for n in range(9))
    long = "import pytest\n@pytest.mark.first\n@pytest.mark.method('{}')\ndef test_long(twins): pass"
    # The tests of KIVI take longer, since its kernels do.
    write(pytester.path, test_all=others, test_lockstep=long.format("h2o"), test_needle=long.format("kivi"))
    found = in_process("--collect-only", "-q", "-k", "not _out").outlines
    names = [line.split("::")[0] for line in found if "::" in line]
    assert names == ["test_needle.py", *["test_all.py"] * 2, "test_lockstep.py", *["test_all.py"] * 2]


@pytest.mark.slow
def test_the_garbage_collector_leaves_out_what_was_collected_and_all_is_put_back(python, tmp_path):
    write(tmp_path, test_frozen="import gc\ndef test_frozen(): assert gc.isenabled() and gc.get_freeze_count() > 9999")
    code = (
        "import gc, sys, pytest\n"
        f"status = pytest.main(['-q', '-p', 'no:cacheprovider', '--kv-device=cpu', {str(tmp_path)!r}])\n"
        "sys.exit(status or gc.get_freeze_count() or not gc.isenabled())"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("interpreted", [True, False])
def test_what_is_slow_on_the_cpu_is_slow_in_the_interpreter_alone(interpreted, pytester, in_process, monkeypatch):
    backend = environment.Backend(torch.device("cpu"), interpreted, "a device", "of this test")
    monkeypatch.setattr(environment, "choose", lambda _: backend)
    write(pytester.path, test_times="""
import pytest
@pytest.mark.slow_on_cpu
def test_long(): pass
def test_short(): pass
""")
    in_process("-m", "not slow").assert_outcomes(passed=1 if interpreted else 2, deselected=int(interpreted))
