"""The matrix of hosts: what each host changes, which of them this CPU cannot run, and the detection of failures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvtwin.conformance.lab import hosts


def test_the_matrix_has_each_kind_of_machine():
    made = {host.name: host for host in hosts.hosts()}
    assert len(made) == len(hosts.hosts())
    assert {f"blas-{core}" for core in hosts.CORES} < made.keys()
    assert {f"torch-{name}" for name in hosts.CAPABILITIES} < made.keys()
    assert {"threads-1", "threads-2", "numpy-baseline", "numpy-oldest", "numpy-newest"} < made.keys()
    assert made["interpreter-plain"].tests == "", "the whole suite"
    assert made["numpy-oldest"].numpy == f"numpy=={hosts.oldest('numpy')}"


def test_each_host_changes_something():
    for host in hosts.hosts():
        assert host.variables or host.numpy, host.name


def test_a_probe_names_what_runs_and_notices_what_cannot(monkeypatch):
    import os

    monkeypatch.setattr(hosts, "PROBE", "print('Core: Zen'); print(1.5, 'AVX2')")
    assert hosts.probe(dict(os.environ)) == (True, "BLAS kernels Zen, torch AVX2")
    monkeypatch.setattr(hosts, "PROBE", "import os; os.kill(os.getpid(), 4)")
    assert hosts.probe(dict(os.environ)) == (False, "this CPU lacks an instruction (signal 4)")
    monkeypatch.setattr(hosts, "PROBE", "raise ImportError('no numpy')")
    assert hosts.probe(dict(os.environ)) == (False, "ImportError: no numpy")


@pytest.mark.parametrize(
    ("code", "verdict", "detail"),
    [
        ("def test_ties(): assert __import__('os').environ['CHANGED'] == '1'", "green", "1 passed"),
        ("def test_ties(): assert 'one' == 'other'", "red", "1 failed"),
        ("def test_of_something_else(): pass", "red", "no test ran"),
    ],
)
def test_a_host_is_red_where_a_test_fails_or_none_runs(tmp_path, monkeypatch, code, verdict, detail):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(code)
    monkeypatch.setattr(hosts.plugin, "HERE", tests)
    monkeypatch.setattr(hosts, "PROBE", "print('0.0 none')")
    host = hosts.Host("it", {"CHANGED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, tests="ties")
    outcome = hosts.run_host(host, ["--rootdir", str(tests)], tmp_path)
    assert outcome.verdict == verdict, outcome.detail
    assert outcome.detail.startswith(detail)


def test_an_unknown_host_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        hosts.main(["--only", "blas-Pentium"])
    assert "unknown host 'blas-Pentium'; expected one of blas-Prescott" in capsys.readouterr().err


def test_the_list_runs_nothing():
    command = [sys.executable, "-m", "kvtwin.conformance.lab.hosts", "--list", "--only", "blas-Haswell,threads-2"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["blas-Haswell", "threads-2"]


def test_the_tests_of_ties_are_not_all_tests_of_properties():
    assert not [word for word in hosts.TIES.split(" or ") if word in "test_properties.py test_capabilities.py"]
