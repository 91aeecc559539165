"""The command that runs every kernel under compute-sanitizer: what it reads in the tools' output, and when it fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvtwin.conformance.harness import watch
from kvtwin.conformance.lab import sanitize

#: Output of compute-sanitizer 2025.3 on an H200 for lab/faults.py, and of a kernel of torch's.
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at fault_memcheck+0xc0 in faults.py:34
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f9a34800200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f9a34800000 of size 512 bytes
=========
========= ERROR SUMMARY: 1 error
"""
INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at fault_initcheck+0x70 in faults.py:40
=========     by thread (96,0,0) in block (0,0,0)
=========     Address 0x7fa460800380
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4>(int, T2, T3)+0x70
=========     by thread (97,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at fault_inline+0xa0 in faults.py:46
=========     and Read access at fault_inline+0xc0 in faults.py:46 [512 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
SYNCCHECK = """========= COMPUTE-SANITIZER
========= Barrier error detected. Invalid arguments.
=========     at fault_inline+0x80 in faults.py:46
=========     by thread (64,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
FAULTS = {"fault_memcheck", "fault_initcheck", "fault_inline"}


@pytest.mark.parametrize(("log", "kernel", "others"), [
    (MEMCHECK, "fault_memcheck", 0), (INITCHECK, "fault_initcheck", 1), (RACECHECK, "fault_inline", 0),
    (SYNCCHECK, "fault_inline", 0),
], ids=sanitize.TOOLS)
def test_findings_are_those_in_our_kernels(log, kernel, others):
    found = sanitize.findings_in(log, FAULTS)
    assert {name: len(texts) for name, texts in found.ours.items()} == {kernel: 1}
    assert (found.others, found.finished) == (others, True)
    assert not sanitize.findings_in(log, {"attend_kernel"}).ours


def test_a_tool_that_stops_early_has_not_finished():
    assert not sanitize.findings_in(MEMCHECK.partition("========= ERROR")[0], FAULTS).finished
    assert sanitize.findings_in("no output of a tool", FAULTS) == sanitize.Found({}, 0, False)


#: A stand-in for compute-sanitizer: it runs nothing, and prints what `LOGS` has for the tool and the module.
STAND_IN = """#!{python}
import os, sys
tool, module = sys.argv[2], sys.argv[-1 if sys.argv[-2] == "-m" else -2].rpartition(".")[2]
print(open(os.path.join({logs!r}, tool + "." + module)).read())
"""
CLEAN = "kvtwin.some_kernel 3\n========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the stand-in prints: each tool finds its fault, and nothing else."""
    program, logs = tmp_path / "bin" / sanitize.PROGRAM, tmp_path / "logs"
    program.parent.mkdir()
    logs.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, logs=str(logs)))
    program.chmod(0o755)
    for tool, log in zip(sanitize.TOOLS, (MEMCHECK, INITCHECK, RACECHECK, SYNCCHECK), strict=True):
        (logs / f"{tool}.faults").write_text(log)
        (logs / f"{tool}.launch").write_text(CLEAN)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "launched_kernels", lambda methods: {"kvtwin.some_kernel"})
    run = sanitize.run
    monkeypatch.setattr(sanitize, "run", lambda tool, *rest: run(tool, *rest) if tool else (0, ""))
    return logs


@pytest.mark.parametrize(("file", "text", "says"), [
    (None, "", "no findings"),
    ("racecheck.faults", CLEAN, "racecheck does not find its planted fault"),
    ("memcheck.launch", CLEAN + MEMCHECK.replace("fault_memcheck", "some_kernel"), "memcheck: Invalid __global__"),
    ("initcheck.launch", CLEAN.replace("some_kernel 3", "other_kernel 3"), "were not launched: kvtwin.some_kernel"),
    ("synccheck.launch", "kvtwin.some_kernel 3\n", "synccheck: launch.py ended with exit code 0"),
], ids=["clean", "blind", "finding", "not launched", "not finished"])
def test_the_exit_code(file, text, says, tools, tmp_path, capsys):
    if file is not None:
        (tools / file).write_text(text)
    assert sanitize.main(["--logs", str(tmp_path / "out")]) == (0 if file is None else 1)
    assert says in capsys.readouterr().out


def test_without_the_program_it_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="2"):
        sanitize.main([])
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err


@pytest.mark.parametrize(("log", "code", "status", "says"), [
    (MEMCHECK, 0, 1, "memcheck: 1 findings, 0 in kernels of PyTorch and CUDA"),
    (INITCHECK.replace("fault_initcheck", "void at::native::other"), 0, 0, "0 findings, 2 in kernels of PyTorch"),
    (MEMCHECK.replace("fault_memcheck", "my_gemm_of_flash_fwd"), 0, 1, "memcheck: 1 findings, 0 in kernels of PyTorch"),
    (CLEAN, 6, 0, "memcheck: 0 findings"), (CLEAN, 1, 1, "longflow of theirs: WRONG"), (CLEAN, 4, 4, ""),
    ("", 0, 3, ""),
], ids=["finding", "of torch", "a name like a library's", "few cases", "wrong", "no start", "not finished"])
def test_the_tool_reports_on_another_packages_kernels(log, code, status, says, tmp_path, monkeypatch, capsys):
    program = tmp_path / sanitize.PROGRAM
    program.write_text(f"#!{sys.executable}\nprint({log!r} + 'longflow of theirs: WRONG')\nraise SystemExit({code})\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert watch.run("memcheck", ["longflow", "--impl=theirs"], tmp_path / "logs") == status
    said = capsys.readouterr().out
    assert says in said and "=========" not in said
