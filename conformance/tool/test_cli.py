"""The command ``kvtwin``: its output and its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from fractions import Fraction

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvtwin.conformance import __main__ as main_job
from kvtwin.conformance import cli, discovery, ledger, plugin
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.harness import results
from kvtwin.conformance.harness.report import write_report
from kvtwin.conformance.lab.report_sample import passed, sample
from kvtwin.fixtures import accuracy_of

METHODS = ", ".join(pair.name for pair in discovery.pairs())


def refused(capsys, *arguments: str) -> str:
    """The error that a command prints. It must end with argparse's exit code for wrong usage."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: kvtwin {command}" if command else "usage: kvtwin")
    assert len(said.splitlines()) <= 40


def test_without_a_command_it_prints_the_help(capsys):
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_methods_lists_every_method(capsys):
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [pair.name for pair in discovery.methods()]
    assert lines[0].endswith(discovery.methods()[0].config.__name__)


def test_claims_prints_the_ledger_of_the_methods_that_it_is_given(capsys):
    assert cli.main(["claims", "keydiff"]) == 0
    claims, left_out = (
        [one for one in found if one.method == "keydiff"] for found in (ledger.load(), ledger.omitted())
    )
    expected = ledger.table(claims, left_out, ledger.sources())
    assert "\nJudged: " in expected
    assert capsys.readouterr().out == f"{expected}\n"


def test_accuracy_prints_the_stored_rows_of_a_method(capsys):
    """Also those with its authors' options, such as "tova (per_head=False)"."""
    rows = json.loads((plugin.HERE.parent / "fixtures" / "accuracy.json").read_text(encoding="utf-8"))["rows"]
    method = next(row["method"].split(" (")[0] for row in rows if " (" in row["method"])
    assert cli.main(["accuracy", method]) == 0
    said = capsys.readouterr().out
    assert "recall %" in said
    lines = said.split("\n\n")[0].splitlines()
    assert {line.split()[0] for line in lines} == {"method", method}
    assert len(lines) == 1 + sum(row["method"].split(" (")[0] == method for row in rows)


def test_replay_judges_a_saved_case(tmp_path, capsys):
    path = tmp_path / "case.safetensors"
    case = DecodeCase(batch=1, key_value_heads=1, group=1, head_dim=16, slots=3)
    assert case.save(path) == f"kvtwin replay {path}"
    assert cli.main(["replay", str(path), "--impl", "kvtwin.reference"]) == 0
    assert "right" in capsys.readouterr().out


def test_replay_of_given_tensors_judges_the_fields_alone(tmp_path, capsys, device):
    """The checks of several calls need other contents of the same sizes, which a case of recorded tensors has not."""
    key = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    case = DecodeCase.of(key[:, :, 0], key, key, torch.ones(1, 5, dtype=torch.bool))
    drawn, given = tmp_path / "drawn.safetensors", tmp_path / "given.safetensors"
    case.save(given, "longflow.decode_attention")
    DecodeCase(slots=5).save(drawn, "longflow.decode_attention")
    assert cli.main(["replay", str(given), str(drawn), "--impl", "kvtwin.reference", "--device", device.type]) == 0
    of_given, of_drawn = capsys.readouterr().out.split(str(drawn))
    assert "longflow.decode_attention.slot: right" in of_given
    assert "the same call again" not in of_given
    assert "the same call again: right" in of_drawn


def test_replay_refuses_a_case_that_was_edited(tmp_path, capsys):
    """Fields of the description that are left out or wrong, and tensors that do not fit it."""
    path = tmp_path / "case.safetensors"
    DecodeCase(batch=1, key_value_heads=1, group=1, head_dim=16, slots=3).save(path)
    with safe_open(path, "pt") as file:
        fields = json.loads(file.metadata()["kvtwin"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    without_key = {name: tensor for name, tensor in tensors.items() if name != "key"}
    changes = [
        *({**fields, name: value} for name in ("kind", "dtype", "absent", "batch", "slots")
          for value in (None, -1, "x", [1], {})),
        *({key: value for key, value in fields.items() if key != name} for name in ("kind", "dtype", "absent")),
        {**fields, "unknown": 1}, [], None, 3, "text",
    ]
    files = [({"kvtwin": json.dumps(change)}, tensors) for change in changes]
    files += [({"kvtwin": "{"}, tensors), ({}, tensors), ({"kvtwin": json.dumps(fields)}, without_key)]
    for metadata, held in files:
        save_file(held, path, metadata=metadata)
        assert "case.safetensors holds no saved case" in refused(capsys, "replay", str(path)), metadata


ROOMS = [path for room in results.ROOMS for path in sorted((plugin.HERE / room).rglob("test_*.py"))]


def test_the_main_job_leaves_out_the_tests_of_caches_and_no_claim():
    """Only the files that it leaves out need transformers. They test no claim."""
    texts = {path: path.read_text(encoding="utf-8") for path in ROOMS}
    left_out = [path for path, text in texts.items() if re.search(r"^pytestmark = .*mark\.whole", text, re.M)]
    assert len(left_out) > 10
    for path, text in texts.items():
        assert ("mark.claim(" if path in left_out else "importorskip(\"transformers") not in text, path.name


@pytest.mark.parametrize(("named", "more", "expected", "rooms"), [
    ([], ["--hypothesis-profile=quick"], "not slow and not whole and (main or claim)", results.ROOMS),
    (["h2o"], ["--hypothesis-profile=quick"], "not slow and not whole", results.ROOMS),
    ([], ["--hypothesis-profile=ci"], "not whole", results.ROOMS),
    (["h2o"], ["--impl=mine"], None, (results.SUITE,)),
])
def test_markers_and_rooms_say_what_the_main_job_runs(named, more, expected, rooms):
    chosen = main_job.parser().parse_args([*named, *more, "--jobs=1"])
    chosen.required, chosen.methods = named, named or ["h2o"]
    arguments = main_job.pytest_arguments(chosen)
    assert (arguments[arguments.index("-m") + 1] if "-m" in arguments else None) == expected
    assert arguments[: len(rooms)] == [str(plugin.HERE / room) for room in rooms]
    assert f"--ignore={plugin.HERE / 'methods' / 'kivi'}" in arguments


@pytest.mark.parametrize(("more", "seed"), [
    ([], 123), (["--seed", "7"], 7), (["--seed", "0"], 0), (["--hypothesis-profile", "brief"], 0),
    (["--hypothesis-profile", "thorough"], 123),
])
def test_each_run_on_an_implementation_has_another_seed_unless_it_is_given(more, seed, monkeypatch):
    monkeypatch.setattr(main_job.secrets, "randbelow", lambda most: 123)
    chosen = main_job.parser().parse_args(["h2o", "--impl", "mine", *more])
    chosen.jobs, chosen.required = 1, ["h2o"]
    assert [one for one in main_job.pytest_arguments(chosen) if "seed" in one] == [f"--hypothesis-seed={seed}"]


def test_a_missing_extra_is_named(monkeypatch, capsys):
    def needs_pytest(arguments, prog):
        raise ModuleNotFoundError("No module named 'pytest'", name="pytest")

    monkeypatch.setitem(cli.COMMANDS, "verify", needs_pytest)
    assert "kvtwin verify needs pytest: python -m pip install 'kvtwin[test]'" in refused(capsys, "verify")


def test_help_needs_neither_torch_nor_pytest():
    code = (
        "import sys\nsys.modules.update(torch=None, pytest=None)\nfrom kvtwin.conformance import cli\n"
        "cli.main(['methods'])\ncli.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "commands:" in done.stdout


def test_the_script_is_installed():
    config = plugin.HERE.parent / "pyproject.toml"
    if not config.is_file():
        pytest.skip("needs the source tree, and these tests are installed")
    scripts = tomllib.loads(config.read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"kvtwin": f"{cli.__name__}:main"}


def test_accuracy_is_added_to_the_report(tmp_path, monkeypatch, capsys):
    """The measurement itself is tested in test_accuracy_of.py."""
    report = tmp_path / "a.html"
    write_report(sample(passed(44)) | {"accuracy": []}, report)
    assert "Accuracy of a small model" not in report.read_text(encoding="utf-8")
    asked = []

    def evaluate(implementation, *, plan, methods, device):
        asked.append((implementation, plan.queries, methods, device))
        answers = {"recall": {"accuracy": 0.25, "standard_error": None, "right": 1, "queries": 4, "documents": 1}}
        return [accuracy_of.Row("keydiff", "KeyDiffState", 8, Fraction(1, 2), theirs=answers, reference=answers)]

    monkeypatch.setattr(accuracy_of, "evaluate", evaluate)
    chosen = main_job.parser().parse_args(
        ["keydiff", "--impl=theirs", "--accuracy", "--device=cpu", f"--report={report}"]
    )
    chosen.required = ["keydiff"]
    main_job.add_accuracy(chosen)
    assert asked == [("theirs", main_job.QUERIES, ["keydiff"], "cpu")]
    assert "KeyDiffState" in capsys.readouterr().out
    assert "Accuracy of a small model" in report.read_text(encoding="utf-8")
    assert json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))["accuracy"][0]["budget"] == 8
