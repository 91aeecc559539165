"""The comparison with kvpress: kvtwin's side is measured here, kvpress's where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf or kvpress")

from kvtwin.fixtures import accuracy, kvpress_comparison
from kvtwin.fixtures.accuracy import Plan
from kvtwin.fixtures.accuracy_caches import Everything
from kvtwin.fixtures.kvpress_comparison import OURS, THEIRS, main, rows
from kvtwin.fixtures.load import load_model

HAS_KVPRESS = importlib.util.find_spec("kvpress") is not None
PLAN = Plan(length=256, prompt=192, queries=4)
#: Bytes of a token in all layers, in float32.
SIZES = load_model().config
EACH = 2 * 4 * SIZES.num_hidden_layers * SIZES.num_key_value_heads * SIZES.head_dim


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "expected --kvpress PYTHON"),
    (["snapkw"], "no method 'snapkw': did you mean snapkv?"),
    (["--ratio", "1"], "--ratio: expected a number from 0 to 0.99, got '1'"),
    (["--kvpress", "no_such_python", "tova", "--ratio=0.5"], "cannot run no_such_python: No such file"),
], ids=["nothing", "method", "ratio", "python"])
def test_wrong_command_lines_are_one_line(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "no_such_python")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and said.count("\n") == 1


@pytest.mark.skipif(HAS_KVPRESS, reason="the environment has kvpress")
def test_a_python_without_kvpress_is_named(capsys):
    arguments = ["tova", "--ratio=0.5", "--queries=1"]
    with pytest.raises(kvpress_comparison.ComparisonError, match=r"No module named 'kvpress' .*kvtwin\[kvpress\]"):
        kvpress_comparison.measured(sys.executable, THEIRS, arguments)
    assert not capsys.readouterr().err


def same_answers(found: dict[str, Any]) -> bool:
    """Whether a row has the accuracy of our own model with full attention."""
    asked = accuracy.questions(PLAN)
    plain = accuracy.measure(load_model(), asked, lambda rows: Everything(), PLAN, PLAN.prompt, 32)
    return found["tasks"] == plain["tasks"]


@pytest.mark.skipif(HAS_KVPRESS, reason="kvpress's transformers is older than kvtwin's caches need")
def test_our_side_holds_what_the_ratio_leaves():
    full, half = rows(OURS, ["streaming_llm"], [0.5], PLAN)
    assert same_answers(full) and full["bytes"] == (PLAN.length - 1) * EACH
    assert half["bytes"] == PLAN.prompt // 2 * EACH and half["tasks"] != full["tasks"]
    text = kvpress_comparison.table([full, half])
    assert [line.split()[-3] for line in text.splitlines()[1:3]] == ["2089.0", "786.4"]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")      # of what kvpress imports
@pytest.mark.skipif(not HAS_KVPRESS, reason="needs the extra kvpress")
def test_a_press_that_drops_nothing_is_full_attention():
    full, none, half = rows(THEIRS, ["tova"], [0.0, 0.5], PLAN)
    assert same_answers(full) and same_answers(none) and none["bytes"] == full["bytes"]
    assert half["bytes"] == full["bytes"] - PLAN.prompt // 2 * EACH
