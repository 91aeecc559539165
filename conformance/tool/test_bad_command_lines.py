"""Wrong command lines of every command: one line on stderr says what is wrong, exit 2 or 4, nothing is written."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvtwin.conformance import cli, command_line, new_method
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.harness import environment, naming, options

#: The line of a command, and a part of what it says. In the folder of `place`.
ROWS = [
    ("verfy", "no command 'verfy': did you mean verify?"),
    ("''", "no command ''; there are: verify"),
    ("verify longflw", "no method 'longflw': did you mean longflow?"),
    ("verify longflow nothing", "no method 'nothing'; there are: cake"),
    ("verify ''", "no method ''; there are: cake"),
    ("verify --impl", "argument --impl: expected one argument"),
    ("verify --impl ''", "--impl: expected a text that is not empty"),
    ("verify longflow --impl ./theirs", "--impl './theirs': expected the name of a module"),
    ("verify longflow --impl no_such", "--impl no_such: cannot import it"),
    ("verify longflow --impl wrong_syntax", "--impl wrong_syntax: cannot import it: it raised SyntaxError"),
    ("verify longflow --impl exits", "--impl exits: cannot import it: it raised SystemExit"),
    ("verify h2o --impl theirs", "--impl: nothing of h2o to judge"),
    ("verify --device cud", "--device: invalid choice: 'cud'"),
    ("verify longflow --impl theirs --device cuda", "--device cuda, but "),
    ("verify longflow --report folder", "--report folder: expected a name that ends in .html or .json"),
    ("verify longflow --report report.txt", "--report report.txt: expected a name"),
    ("verify longflow --report ''", "--report: expected a text that is not empty"),
    ("verify longflow --report no_such/report.html", "--report no_such/report.html: the folder"),
    ("verify longflow --report text/report.html", "--report text/report.html: the folder"),
    ("verify longflow --report folder.html", "folder.html: Is a directory"),
    ("verify longflow --report beside.html", "beside.json: Is a directory"),
    ("verify longflow --report /proc/report.html", "cannot write /proc/report"),
    ("verify longflow --sarif report.json", "--sarif report.json: expected a name that ends in .sarif"),
    ("verify longflow --sarif no_such/a.sarif", "--sarif no_such/a.sarif: the folder"),
    ("verify longflow --sarif ''", "--sarif: expected a text that is not empty"),
    ("verify -j 0", "-j/--jobs: expected an integer from 1 to 256, got '0'"),
    ("verify -j x", "expected an integer from 1 to 256, got 'x'"),
    ("verify -j 100000000", "expected an integer from 1 to 256"),
    ("verify --hypothesis-profile quik", "no profile 'quik': did you mean quick?"),
    ("verify --hypothesis-profile ''", "--hypothesis-profile: no profile ''"),
    ("verify --seed x", "--seed: expected an integer from 0 to"),
    ("verify --seed -1", "--seed: expected an integer from 0 to"),
    ("verify -k ''", "-k: expected a text that is not empty"),
    ("verify -k 'and and'", "-k: expected names with and, or, not, got 'and and'"),
    ("verify --impl theirs --call-limit 0", "--call-limit: expected a number from 0.001 to 86,400.0, got '0'"),
    ("verify --impl theirs --call-limit nan", "--call-limit: expected a number"),
    ("verify --impl theirs --call-limit inf", "--call-limit: expected a number"),
    ("verify --call-limit 5", "--call-limit needs --impl"),
    ("verify --impl theirs --time-limit 0", "--time-limit: expected a number"),
    ("verify --time-limit 5", "--time-limit needs --impl"),
    ("verify --sanitize", "--sanitize needs --impl"),
    ("verify --impl theirs --sanitize memchek", "--sanitize: invalid choice: 'memchek'"),
    ("verify --impl theirs --device cpu --sanitize", "--sanitize: --device=cpu has no kernels"),
    ("verify longflow --accuracy", "--accuracy needs --impl"),
    ("verify longflow --xfails ''", "--xfails: expected a text that is not empty"),
    ("verify longflow --xfails no_such", "--xfails: cannot read no_such: No such file"),
    ("verify longflow --xfails folder", "--xfails: cannot read folder: Is a directory"),
    ("verify longflow --xfails binary", "--xfails: cannot read binary: it is not UTF-8"),
    ("verify --no-such", "unrecognized arguments: --no-such"),
    ("replay", "required: FILE"),
    ("replay no_such", "no such file: 'no_such'"),
    ("replay ''", "no such file: ''"),
    (f"replay {'x' * 400}", "no such file: 'xxx"),
    ("replay folder", "a folder: 'folder'"),
    ("replay case.safetensors no_such", "no such file: 'no_such'"),
    ("replay text", "text holds no saved case"),
    ("replay empty", "empty holds no saved case"),
    ("replay binary", "binary holds no saved case"),
    ("replay case.safetensors --impl ''", "--impl: expected a text that is not empty"),
    ("replay case.safetensors --impl no_such", "--impl no_such: cannot import it"),
    ("replay case.safetensors --impl exits", "--impl exits: cannot import it: it raised SystemExit"),
    ("replay case.safetensors --device cuda", "--device cuda, but "),
    ("replay case.safetensors --seed 3", "unrecognized arguments: --seed 3"),
    ("methods extra", "unrecognized arguments: extra"),
    ("new", "required: NAME"),
    ("new ''", "NAME must be a Python identifier"),
    ("new my-method", "NAME must be a Python identifier"),
    ("new class", "NAME must be a Python identifier"),
    ("new longflow", "NAME 'longflow' is the name of a module of kvtwin"),
    ("new json", "NAME 'json' is the name of an installed module"),
    ("new fresh ''", "FOLDER: expected a text that is not empty"),
    ("new fresh --kind forgets", "argument --kind: invalid choice: 'forgets'"),
    ("new fresh --kind ''", "argument --kind: invalid choice: ''"),
    ("new fresh --kind", "argument --kind: expected one argument"),
    ("new fresh folder", "FOLDER folder exists"),
    ("new fresh text", "FOLDER text exists"),
    ("new fresh text/inside", "FOLDER text/inside cannot be written: Not a directory"),
    ("new fresh /proc/inside", "FOLDER /proc/inside cannot be written: No such file"),
    ("claims keydif", "no method 'keydif': did you mean keydiff?"),
    ("claims ''", "no method ''; there are: "),
    ("capacity --model qwen", "--model: invalid choice: 'qwen'"),
    ("capacity --memory ''", "memory must be a number and B, KB"),
    ("capacity --memory 1e5GB", "memory must be a number and B, KB"),
    (f"capacity --memory {'9' * 400}GB", "memory must be at most 1,000,000,000,000,000,000 bytes"),
    ("capacity --context 0", "--context: expected an integer from 1 to 100,000,000, got '0'"),
    ("capacity --context x", "--context: expected an integer"),
    ("capacity --budget -5", "--budget: expected an integer from 1 to 1,048,576, got '-5'"),
    ("accuracy --impl no_functions", "no_functions has no state of any method"),
    ("accuracy longflw", "no method 'longflw': did you mean longflow?"),
    ("accuracy --impl ''", "--impl: expected a text that is not empty"),
    ("accuracy --impl no_such", "--impl no_such: cannot import it: No module named 'no_such' ("),
    ("accuracy --impl theirs.longflow.decode_attention", "--impl theirs.longflow.decode_attention: cannot import it"),
    ("accuracy --impl exits", "--impl exits: cannot import it: it raised SystemExit"),
    ("accuracy h2o --impl theirs", "theirs has no state of h2o"),
    ("accuracy --impl theirs --queries 0", "--queries: expected an integer from 1 to 100,000, got '0'"),
    ("accuracy --impl theirs --queries 1e9", "--queries: expected an integer from 1 to 100,000"),
    ("accuracy --impl theirs --dtype int8", "--dtype: invalid choice: 'int8'"),
    ("accuracy longflow --impl theirs --dtype float16", "one of those that theirs declares, float32, and of "),
    ("accuracy --impl theirs --device cuda", "--device cuda, but "),
    ("accuracy longflow --queries 3", "--queries needs --impl"),
    ("accuracy longflow --device cpu", "--device needs --impl"),
]  # fmt: skip
THEIRS = """
from kvtwin.conformance import Capabilities
from kvtwin.reference.longflow import LongFlowState, decode_attention
CAPABILITIES = Capabilities(dtypes=("float32",))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: files, folders in place of files, modules, a saved case."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "theirs").mkdir()
    texts = {
        "theirs/__init__.py": "", "theirs/longflow.py": THEIRS, "wrong_syntax.py": "1 +",
        "no_functions.py": "", "exits.py": "import sys\nsys.exit(3)", "text": "words", "empty": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("folder", "folder.html", "beside.json"):
        (tmp_path / name).mkdir()
    DecodeCase(slots=3).save(str(tmp_path / "case.safetensors"), "longflow.decode_attention")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(environment, "_check_triton", lambda **_: None)  # in a process whose kernels are compiled
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    profile = settings.get_current_profile_name()  # a run in this process loads another
    yield tmp_path
    settings.load_profile(profile)
    modules = {"theirs", "wrong_syntax", "exits", "no_functions"}
    for name in [name for name in sys.modules if name.split(".")[0] in modules]:
        del sys.modules[name]


@pytest.mark.parametrize(("line", "says"), ROWS, ids=[line[:60] for line, _ in ROWS])
def test_one_line_says_what_is_wrong(line, says, place, capfd):
    before = sorted(path.name for path in place.iterdir())
    try:
        status = cli.main(shlex.split(line))
    except SystemExit as error:
        status = error.code
    out, err = capfd.readouterr()
    said = [one for one in err.splitlines() if one.strip()]
    assert status in (2, 4), (status, out, err)
    assert len(said) == 1, err
    assert says in said[0]
    assert not out.strip() and "--kv-" not in err
    assert sorted(path.name for path in place.iterdir() if path.name != "__pycache__") == before


def test_an_earlier_report_stays_if_a_new_one_cannot_be_written(tmp_path, monkeypatch):
    from kvtwin.conformance.harness import report

    path = tmp_path / "a.html"
    path.write_text("earlier")
    monkeypatch.setattr(report, "page", lambda made: "later")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        report.write_report({}, path)
    assert path.read_text() == "earlier" and [one.name for one in tmp_path.iterdir()] == ["a.html"]


def test_checking_a_report_changes_no_file(tmp_path):
    earlier = tmp_path / "a.json"
    earlier.write_text("earlier")
    for file in (earlier, tmp_path / "b.json"):
        options._check_writable(file, "--report")
    assert earlier.read_text() == "earlier" and [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_a_package_is_written_as_a_whole(tmp_path, monkeypatch):
    write, count = Path.write_text, []

    def fails_late(self, *args, **named):
        count.append(self)
        if len(count) == 4:
            raise OSError(28, "No space left")
        return write(self, *args, **named)

    monkeypatch.setattr(Path, "write_text", fails_late)
    with pytest.raises(OSError, match="cannot be written: No space left"):
        new_method.write("fresh_method", tmp_path / "made")
    assert len(count) == 4 and not (tmp_path / "made").exists()


def test_options_are_named_as_they_were_typed():
    assert naming.option("--kv-report") == "--kv-report"
    with naming.typed("--impl"):
        assert naming.option("--kv-report") == "--report"


def test_numbers_are_of_their_kind():
    assert command_line.number(1, 5)("5") == 5 and command_line.number(0, 1, whole=False)("0.5") == 0.5
    for text in ("0", "6", "1.5", "", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 5"):
            command_line.number(1, 5)(text)
