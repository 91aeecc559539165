"""Damaged files and wrong command lines: a clear error, and no traceback."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import cli
from kvtwin.conformance.cases import saved
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.harness import options
from kvtwin.fixtures.load import FixtureError, parse_trace
from kvtwin.reference.synckv import HeadClusters

pytestmark = pytest.mark.kind("bad_input")

many = settings(max_examples=20 if settings.get_current_profile_name() == "soak" else max(4, settings().max_examples))


def head_clusters(path: Path) -> None:
    HeadClusters.save(path, [HeadClusters((0, 1, 0), (2, 1)), HeadClusters((0, 0, 0), (1,))])


def saved_case(path: Path) -> None:
    key = torch.ones(1, 1, 3, 2)
    DecodeCase.of(key[:, :, 0], key, key, torch.ones(1, 3, dtype=torch.bool)).save(path, "longflow.decode_attention")


def trace(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"key": torch.ones(2, 3)}, path, {"kvtwin": '{"model": "x"}'})


def read_trace(path: Path) -> None:
    try:
        parse_trace(path.read_bytes())
    except FixtureError as error:
        raise ValueError(f"{path}: {error}") from error


def refusal(call: Callable[..., Any], *arguments: Any) -> str | None:
    """The message of a ValueError or usage error that a call raises; None if it raises none."""
    try:
        call(*arguments)
    except (ValueError, pytest.UsageError) as error:
        return str(error)
    return None


FILES: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "head clusters": (head_clusters, HeadClusters.load), "case": (saved_case, saved.load), "trace": (trace, read_trace),
}


@pytest.mark.parametrize("kind", FILES)
@given(data=st.data())
@many
def test_a_damaged_file_is_refused_by_name_or_read(kind: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    write, read = FILES[kind]
    path = tmp_path_factory.mktemp("damaged") / "file"
    write(path)
    content = bytearray(path.read_bytes())
    read(path)
    edits = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for place, byte in data.draw(st.lists(edits, min_size=1, max_size=3)):
        content[place] = byte
    path.write_bytes(content[:data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    assert str(path) in (refusal(read, path) or str(path))


COMMANDS: dict[str, list[str]] = {
    "replay": ["--impl", "--device"], "methods": [], "claims": [], "capacity": [
        "--model", "--memory", "--context", "--budget", "--json"
    ], "accuracy": ["--dtype", "--device", "--queries", "--impl"], "verify": [
        "--impl", "--device", "--report", "-j", "--seed", "-k", "--accuracy", "--xfails", "-x", "-v", "--call-limit",
        "--hypothesis-profile",
    ],
}
WORDS = (
    "", "-1", "0", "nan", "text", "10" * 200, "--", "-x", "--help", "longflow", "cpu", "80GB", "llama-3.1-8b", "1e9GB",
    "\udcff", "/", "..", "a.b", "--unknown", "é",
)


def instead_of_pytest(arguments: list[str], plugins: Any) -> int:
    """In place of pytest, which would run the suite: its command line is complete. An implementation is not found."""
    assert all(isinstance(argument, str) for argument in arguments)
    return pytest.ExitCode.USAGE_ERROR if any(one.startswith("--kv-impl=") for one in arguments) else pytest.ExitCode.OK


@given(data=st.data())
@many
def test_a_command_line_ends_with_a_status(data: st.DataObject) -> None:
    command = data.draw(st.sampled_from(sorted(COMMANDS)))
    arguments = data.draw(st.lists(st.sampled_from([*COMMANDS[command], *WORDS]), max_size=4))
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        mock.patch.object(pytest, "main", instead_of_pytest), mock.patch.object(sys, "path", list(sys.path)),
    ):
        try:
            status: Any = cli.main([command, *arguments])
        except SystemExit as error:
            status = error.code
    said = err.getvalue()
    one_line = said.startswith(f"kvtwin {command}: error: ") and said.count("\n") == 1
    if command == "verify":         # has the codes of pytest, which is not run here
        assert status in (None, 0, 2, 4, 5)
        assert status not in (2, 4) or one_line or "--impl" in arguments, said
    else:
        assert status in (None, 0, 1, 2)
        assert (status == 2) == one_line, said


@pytest.mark.parametrize("text", [b"\xff\xfe", b"", b"\n\n", b"#", b"test_a\x00", b"a" * 10**6, "é\n".encode()])
def test_a_file_of_skips_is_read_or_refused(text: bytes, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    path = tmp_path / "skips"
    path.write_bytes(text)

    class Config:
        invocation_params = pytestconfig.invocation_params

        def getoption(self, dest: str) -> str:
            return str(path)

    said = refusal(options.read_entries, Config(), "kv_skips")
    if said is not None:
        assert str(path) in said
    else:
        assert all(entry.text for entry in options.read_entries(Config(), "kv_skips"))  # type: ignore[arg-type]
