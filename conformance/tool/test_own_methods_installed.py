"""The package that ``kvtwin new`` writes, installed beside kvtwin: its tests pass, and fail for its mutants."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtwin.conformance import cli, plugin
from kvtwin.conformance.tool import new_packages

NAME = "small_keys"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip, to install the package"),
]


class Installed:
    """The package in `folder`, and Python processes that find it."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        left_out = ("TRITON_INTERPRET", "KVTWIN_INTERPRETER", "PYTEST_ADDOPTS")
        environ = {name: value for name, value in os.environ.items() if name not in left_out}
        path = os.pathsep.join(filter(None, [str(self.folder), environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.work, env={**environ, "PYTHONPATH": path}, capture_output=True,
            text=True, timeout=300, check=False,
        )

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--kv-device=cpu",
            "--hypothesis-profile=quick", *arguments,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    source, folder = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("installed")
    assert cli.main(["new", NAME, str(source)]) == 0
    found = Installed(folder, tmp_path_factory.mktemp("work"))
    done = found.python(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile",
        "--target", str(folder), str(source),
    )
    assert done.returncode == 0, done.stderr
    return found


def test_it_is_listed_with_the_other_methods(installed):
    done = installed.python("-m", "kvtwin", "methods")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [NAME, f"{NAME}.reference,", f"{NAME}.optimized:", "SmallKeysConfig"] in rows


def test_verify_runs_its_tests_and_all_are_right(installed):
    """Laws, lockstep, properties, bad input, and the tests of the package."""
    done = installed.python(
        "-m", "kvtwin", "verify", NAME, "--device=cpu", "--jobs=1", "--hypothesis-profile=quick", "--report=report.html"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"verdict: right: {NAME}" in done.stdout
    report = json.loads((installed.work / "report.json").read_text(encoding="utf-8"))
    outcomes = {test["nodeid"]: test["outcome"] for test in report["tests"]}
    assert set(outcomes.values()) == {"passed"}
    generic = ("test_laws", "test_lockstep", "test_properties", "test_blocks_input", "test_pinned")
    for part in (*generic, f"test_{NAME}"):
        assert any(f"{part}.py" in test for test in outcomes), part


def test_its_sides_are_twins(installed):
    """The same interface, no import of the other side, and torch's requirements on operations."""
    every_method = plugin.HERE / "methods" / "every_method"
    files = [str(every_method / name) for name in ("test_twins.py", "test_twins_torch.py", "test_interruptions.py")]
    done = installed.pytest("-k", NAME, "-rA", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in (
        "test_both_sides_export_the_same_names", "test_a_method_has_all_its_parts", "test_operations_pass_opcheck",
        "test_sides_do_not_import_each_other", "test_steps_compile",
    ):
        assert f"::{test}[{NAME}" in done.stdout, test


def test_its_golden_trace_is_stored_in_its_package(installed):
    """And is replayed from then on."""
    for more in ([], ["--check"]):
        done = installed.python("-m", "kvtwin.fixtures.record", "--method", NAME, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    package = installed.folder / NAME
    assert list(json.loads((package / "MANIFEST.json").read_text())["sha256"]) == [f"traces/{NAME}.safetensors"]
    golden = installed.pytest("-k", NAME, str(plugin.HERE / "suite" / "test_blocks_golden.py"))
    assert golden.returncode == 0, golden.stdout
    assert "5 passed" in golden.stdout
    trace = package / "traces" / f"{NAME}.safetensors"
    content = bytearray(trace.read_bytes())
    content[-1] ^= 1
    trace.write_bytes(content)
    changed = installed.python("-m", "kvtwin.fixtures.record", "--method", NAME, "--check")
    shutil.rmtree(package / "traces")
    (package / "MANIFEST.json").unlink()
    assert changed.returncode == 1
    assert f"traces/{NAME}.safetensors was changed" in changed.stdout


def test_its_mutants_are_killed(installed):
    """One by a test of the package, one by a test of kvtwin."""
    only = [f"--only={NAME}-{mutant}" for mutant in ("largest-channel", "half-of-the-channels")]
    done = installed.python("-m", "kvtwin.conformance.lab.mutation", NAME, *only, "--jobs=1", "--store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 mutants killed" in done.stdout
    matrix = json.loads((installed.folder / NAME / "mutants.json").read_text(encoding="utf-8"))
    assert [row["status"] for row in matrix["mutants"]] == ["killed", "killed"]


def test_its_tests_fail_with_a_mistake(installed, tmp_path):
    """In a copy of the package, with the mistake of a mutant."""
    copy = Installed(tmp_path / "copy", tmp_path)
    shutil.copytree(installed.folder, copy.folder)
    module = copy.folder / NAME / "optimized.py"
    module.write_text(module.read_text(encoding="utf-8").replace("tl.where(valid, -norm", "tl.where(valid, norm"))
    done = copy.pytest(str(copy.folder / NAME))
    assert done.returncode == 1, done.stdout
    assert f"test_{NAME}.py::test_the_tokens_with_the_smallest_keys_are_kept[optimized]" in done.stdout
    assert "[reference]" not in done.stdout


@pytest.mark.parametrize(("kind", "old", "new", "wrong"), [
    ("selects", "descending=True", "descending=False", "decisions"),
    ("quantizes", "(code + 12582912.0) - 12582912.0", "tl.floor(code)", "state"),
    ("function", 'tl.where(valid, -norm, float("-inf"))', "-norm", "free_slots"),
])
def test_a_method_of_each_kind_is_right_and_a_mistake_in_it_is_found(kind, old, new, wrong, tmp_path):
    """The tests above are of the kind evicts."""
    module = new_packages.write(tmp_path, NAME, "--kind", kind) / "optimized.py"
    code, text, report = new_packages.verify(tmp_path, NAME, NAME, "--hypothesis-profile=quick")
    assert code == 0 and f"verdict: right: {NAME}" in text, text
    new_packages.replace(module, old, new)
    code, text, report = new_packages.verify(tmp_path, NAME, NAME, "--hypothesis-profile=quick")
    found = report["verdicts"][NAME]
    assert code == 1 and found[wrong]["verdict"] == "wrong" and found[wrong]["follows"] is None, text
    assert {name for name, one in found.items() if one["verdict"] == "wrong" and not one["follows"]} == {wrong}
