"""What ``kvtwin verify --impl`` says before any test, what it notes of calls, and what an interruption leaves."""

from __future__ import annotations

import os
import sys
import types
import warnings

import numpy
import pytest
import torch

from kvtwin.conformance import __main__ as command
from kvtwin.conformance import cli, discovery, stats
from kvtwin.conformance.harness import impl, manners, naming, start

pytest_plugins = ["pytester"]
RIGHT = "from kvtwin.reference.longflow import LongFlowState, decode_attention\n"


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """write(longflow=..., ...): a package "theirs" with these submodules, as a facade."""
    def write(**modules):
        folder = tmp_path / "theirs"
        folder.mkdir()
        for name, text in {"__init__": "", **modules}.items():
            (folder / f"{name}.py").write_text(text)
        return impl.Facade("theirs", impl._import("theirs"))

    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "theirs"]:
        monkeypatch.delitem(sys.modules, name)  # another test's
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "theirs"]:
        del sys.modules[name]


@pytest.mark.parametrize(("text", "says"), [
    ("1 +", r"importing its longflow raised SyntaxError: invalid syntax \(.*theirs/longflow.py, line 1\)"),
    ("\nraise RuntimeError('no GPU\\nhere')", r"raised RuntimeError: no GPU \(.*theirs/longflow.py, line 2\)$"),
    ("import no_such_kernels", r"raised ModuleNotFoundError: .*no_such_kernels.*longflow.py, line 1\)"),
    ("import sys\nsys.exit()", r"raised SystemExit \(.*longflow.py, line 2\)"),
    ("def decode_attn(): pass", r"nothing of longflow to judge: its longflow \(.*longflow.py\) has none of its "
     r"functions and classes: decode_attn: did you mean decode_attention\?. It may have: .*LongFlowState"),
    (RIGHT + "def kept_by_prompts(): pass", None),
    (RIGHT + "class LongflowLayer: pass\nLongflowLayer.__module__ = 'elsewhere'", None),
    ("from kvtwin.reference.longflow import decode_attention\ndef compress_prefills(): pass",
     r"^--kv-impl theirs, longflow: a name is not known: compress_prefills: did you mean compress_prefill\?$"),
    ("decode_attention = None", "nothing of longflow to judge"),
])
def test_modules_and_names_are_checked_first(theirs, text, says):
    facade = theirs(longflow=text)
    if says is None:
        start.check(facade, ["longflow"], ["longflow"])
        return
    with pytest.raises(pytest.UsageError, match=says):
        start.check(facade, ["longflow"], ["longflow"])


def test_only_a_required_method_must_be_there(theirs):
    facade = theirs(longflow=RIGHT)
    start.check(facade, [pair.name for pair in discovery.pairs()], [])
    with pytest.raises(pytest.UsageError, match=r"nothing of tova to judge: theirs has no module or attribute tova"):
        start.check(facade, ["longflow", "tova"], ["tova"])


def test_the_command_names_its_own_option_and_exits_with_4(tmp_path, monkeypatch, capfd, device):
    (tmp_path / "theirs_typo.py").write_text("class longflow:\n    def decode_attn(): pass\n")
    monkeypatch.chdir(tmp_path)
    for name, says in (("theirs_typo", "did you mean decode_attention"), ("no_such", "cannot import it")):
        asked = ["longflow", f"--impl={name}", f"--device={device.type}", "-j1"]
        assert command.main(asked) == pytest.ExitCode.USAGE_ERROR
        said = capfd.readouterr().err
        assert says in said and "--impl" in said and "--kv-impl" not in said and "pytest'" not in said, said
        assert len(said.strip().splitlines()) == 1
    assert naming.impl() == "--kv-impl", "only the command's own run has another name"


def facade_of(function):
    """A facade whose `longflow.decode_attention` is the function."""
    return impl.Facade("theirs", types.SimpleNamespace(longflow=types.SimpleNamespace(decode_attention=function)))


def called(function):
    """What a call returns, and the notes on it."""
    with stats.collect() as found:
        returned = facade_of(function).longflow.decode_attention()
    return returned, list(found.notes)


def test_a_warning_is_a_note():
    def warns():
        warnings.warn("experimental\nkernel", stacklevel=1)
        return 1, 2, 3

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        returned, notes = called(warns)
    assert returned == (1, 2, 3)
    assert notes == ["theirs.longflow.decode_attention warns: UserWarning: experimental"]


@pytest.mark.parametrize(("change", "what"), [
    (lambda: torch.set_default_dtype(torch.float16), "the default dtype"),
    (lambda: torch.set_default_device("meta"), "the default device"),
    (lambda: torch.set_grad_enabled(False), "whether gradients are recorded"),
    (lambda: torch.use_deterministic_algorithms(True), "whether algorithms are deterministic"),
    (lambda: os.environ.update(KVTWIN_TEST="1"), "environment variables"),
], ids=["dtype", "device", "grad", "deterministic", "environ"])
def test_changed_settings_are_noted_and_restored(change, what):
    before = manners._settings()
    assert f"theirs.longflow.decode_attention changes {what}" in called(lambda: (change(), 1, 2))[1]
    assert manners._settings() == before
    assert called(lambda: (1, 2, 3))[1] == []


def test_arrays_of_other_libraries_are_results():
    frozen = numpy.arange(3.0)
    frozen.flags.writeable = False

    class Array:
        def __array__(self):
            return numpy.ones(2, dtype=numpy.float16)

    returned, _ = called(lambda: (numpy.zeros(2, dtype=numpy.float32), frozen, Array()))
    assert [one.dtype for one in returned] == [torch.float32, torch.float64, torch.float16]
    assert returned.score.tolist() == [0.0, 1.0, 2.0] and returned.slot.tolist() == [1.0, 1.0]
    assert impl.as_tensor(torch.float32) is torch.float32 and impl.as_tensor(2) == 2


def test_an_interrupted_run_leaves_the_earlier_report(pytester):
    pytester.makepyfile("import pytest\ndef test_it(): pytest.exit('as Ctrl-C does')")
    earlier = pytester.makefile(".json", report="earlier")
    found = pytester.runpytest_inprocess("-p", "kvtwin", "--kv-impl=kvtwin.reference", f"--kv-report={earlier.name}")
    assert found.ret == pytest.ExitCode.INTERRUPTED
    found.stdout.fnmatch_lines(["kvtwin report: *report.json is not written: the run was interrupted"])
    assert earlier.read_text() == "earlier"


def test_a_replay_judges_the_implementation_that_failed(tmp_path, monkeypatch, capsys, device):
    from kvtwin.conformance.cases.case import DecodeCase

    wrong = RIGHT + (
        "right = decode_attention\ndef decode_attention(*args, **options):\n    found = right(*args, **options)\n"
        "    return found._replace(output=-found.output)\n"
    )
    (tmp_path / "replayed.py").write_text("import types\nlongflow = types.ModuleType('replayed.longflow')\n"
                                          f"exec({wrong!r}, vars(longflow))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    case = DecodeCase(slots=3, device=device.type)
    for name, status, says in (
        ("replayed", 1, f"replayed, f.safetensors: {case}\n"),
        (None, 0, "kvtwin.optimized, f.safetensors: "),
    ):
        case.save("f.safetensors", "longflow.decode_attention", name)
        assert cli.main(["replay", "f.safetensors", f"--device={device.type}"]) == status
        assert capsys.readouterr().out.startswith(says)
    case.save("f.safetensors", "longflow.decode_attention", "no_such")
    with pytest.raises(SystemExit) as caught:
        cli.main(["replay", "f.safetensors", f"--device={device.type}"])
    assert caught.value.code == 2
    assert "--impl no_such: cannot import it" in (said := capsys.readouterr().err)
    assert "f.safetensors was saved for it" in said
    monkeypatch.setattr("kvtwin.conformance.cases.case.version", lambda: "0.0")
    case.save("f.safetensors", "longflow.decode_attention", "kvtwin.reference")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["replay", "f.safetensors", f"--device={device.type}"]) == 0
    assert "saved by kvtwin 0.0, judged by " in capsys.readouterr().out
