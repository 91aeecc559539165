"""The lists of ``--kv-skips`` and ``--kv-xfails``: skips and expected failures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtwin.conformance.harness import options

pytest_plugins = ["pytester"]

THREE = """
def test_one(twins): pass
def test_two(twins): assert False
def test_three(twins): pass
"""


def test_skips_file(pytester, in_process):
    pytester.makepyfile(THREE)
    pytester.path.joinpath("skips.txt").write_text("# ours does not do this\n\n::test_two  # because\n")
    result = in_process("--kv-skips", "skips.txt", "-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*--kv-skips skips.txt:3*"])


def test_xfails_file_and_an_expected_failure_that_passes(pytester, in_process):
    pytester.makepyfile(THREE)
    pytester.path.joinpath("xfails.txt").write_text("test_two\ntest_three\n")
    result = in_process("--kv-xfails", "xfails.txt")
    result.assert_outcomes(passed=1, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*xfails.txt:2*"])


@pytest.mark.parametrize("option", ["--kv-skips", "--kv-xfails"])
def test_an_entry_that_matches_nothing_warns(pytester, in_process, option):
    pytester.makepyfile("def test_passes(twins): pass")
    pytester.path.joinpath("list.txt").write_text("test_gone\n")
    result = in_process(option, "list.txt")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*UnmatchedEntryWarning: {option} list.txt:1: 'test_gone' matches no test"])
    strict = in_process(option, "list.txt", "-W", "error::kvtwin.conformance.harness.options.UnmatchedEntryWarning")
    assert strict.ret == pytest.ExitCode.USAGE_ERROR


def test_deselection_does_not_make_an_entry_match_nothing(pytester, in_process):
    pytester.makepyfile(THREE)
    pytester.path.joinpath("skips.txt").write_text("test_two\n")
    result = in_process("--kv-skips", "skips.txt", "-k", "test_one")
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.no_fnmatch_line("*UnmatchedEntryWarning*")


@pytest.mark.slow
def test_a_large_list_is_read_at_once_and_its_warnings_are_few(pytester, in_process):
    """Half a million entries, of which one matches: comparing each with each test would take minutes."""
    pytester.makepyfile("import pytest\n@pytest.mark.parametrize('n', range(300))\ndef test_many(twins, n): pass")
    lines = [f"{number:050}" for number in range(500_000)]
    pytester.path.joinpath("skips.txt").write_text("\n".join([*lines, "test_many[7]", "x" * 1000]))
    result = in_process("--kv-skips", "skips.txt")
    result.assert_outcomes(passed=299, skipped=1)
    assert sum("UnmatchedEntryWarning: " in line for line in result.stdout.lines) == 6
    result.stdout.fnmatch_lines([
        f"*--kv-skips skips.txt:1: '{0:050}' matches no test",
        f"*499,996 more entries match no test, the last is --kv-skips skips.txt:500002: '{'x' * 200}...'",
    ])


@pytest.mark.parametrize("count", [0, 100])
def test_entries_match_any_part_of_an_id(count):
    """With few entries of a length, and with more than the id has characters."""
    texts = ["test_a", "a.py::test", "[1]", "[2]", "file.py::test_a[1] ", "[1]"]
    texts += [f"{number:03}" for number in range(count)]
    entries = [options.Entry(text, str(number)) for number, text in enumerate(texts)]
    found = {entry.where for entry in options.Entries(entries).matching("a.py::test_a[1]")}
    assert found == {"0", "1", "2", "5"}


def test_an_unreadable_list_is_a_usage_error(pytester, in_process):
    pytester.makepyfile("def test_passes(twins): pass")
    result = in_process("--kv-skips", "nowhere.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kv-skips: cannot read *nowhere.txt*"])


@pytest.mark.parametrize(("line", "text"), [("a # b", "a"), ("a[x#1]", "a[x#1]"), ("  a b ", "a b"), ("#", None)])
def test_lines_of_a_list(tmp_path, line, text):
    path = tmp_path / "list.txt"
    path.write_text(line + "\n")
    config = SimpleNamespace(getoption=lambda dest: str(path), invocation_params=SimpleNamespace(dir=tmp_path))
    assert [entry.text for entry in options.read_entries(config, "kv_skips")] == ([] if text is None else [text])
