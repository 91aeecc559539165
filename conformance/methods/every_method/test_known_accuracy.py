"""Accuracy of the public model: tasks, intervals, and runs that go on. The model here is the small one, over bytes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from kvtwin.conformance import cli, discovery
from kvtwin.fixtures import known, known_accuracy, known_plot, known_tasks
from kvtwin.fixtures.accuracy import FULL
from kvtwin.fixtures.accuracy_caches import config_of, shares_of
from kvtwin.fixtures.decoder import DecoderConfig
from kvtwin.fixtures.known_accuracy import LONG, Form, Run
from kvtwin.fixtures.known_tasks import Plan
from kvtwin.fixtures.load import load_model

pytestmark = pytest.mark.whole


class Bytes:
    """A tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=list(text.encode("ascii")))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(known, "load", lambda where, dtype: (load_model(dtype, where), Bytes()))
    tiny = Form({"codes": Plan(450, 340, 85), "perplexity 2048": Plan(140, 132, 66)}, shares=(1, 4), count=3)
    monkeypatch.setattr(known_accuracy, "SHORT", tiny)


@pytest.fixture(scope="module")
def writer() -> known_tasks.Writer:
    return known_tasks.Writer(Bytes())


# Tasks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["codes", "recall", "arithmetic", "perplexity"])
def test_prompts_have_one_length_and_answers_after_the_context(task, writer):
    plan = Plan(1600, 1200)
    for number in range(10):
        one, again, other = (
            getattr(known_tasks, task)(writer, np.random.default_rng((seed, number)), plan, number)
            for seed in (0, 0, 1)
        )
        assert one.tokens.shape == (1600,)
        assert one.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
        assert one.answers
        assert all(1200 <= start < stop <= 1600 for start, stop in one.answers)


def _text(one: known_tasks.Asked) -> str:
    return bytes(one.tokens.tolist()).decode("ascii")


def test_a_code_is_at_its_depth_with_two_others_elsewhere(writer):
    for number, depth in enumerate(known_tasks.DEPTHS):
        one = known_tasks.codes(writer, np.random.default_rng(number), Plan(1600, 1400), number)
        (start, stop), text = one.answers[0], _text(one)
        before, question = text[:start].rsplit("\nThe code of the ", 1)
        assert one.part == f"depth {depth:.0%}"
        assert before.count("The code of the ") == 3
        assert abs(before.index(f"The code of the {question}{text[start:stop]}.") / 1400 - depth) < 0.12


def test_an_asked_pair_is_in_the_context_once(writer):
    for number in range(8):
        one = known_tasks.recall(writer, np.random.default_rng(number), Plan(1600, 1400), number)
        (start, stop), text = one.answers[0], _text(one)
        name = text[:start].rsplit("\n", 1)[1]
        assert text[:1400].count(f"\n{name}{text[start:stop]}\n") == 1


def test_sums_are_right(writer):
    numbers = {word: value for value, word in enumerate(known_tasks.NUMBERS)}
    one = known_tasks.arithmetic(writer, np.random.default_rng(0), Plan(1600, 800), 0)
    text = _text(one)
    assert len(one.answers) > 3
    for start, stop in one.answers:
        *_, first, plus, second, _ = text[:start].split(" ")
        assert (plus, numbers[first] + numbers[second]) == ("plus", numbers[text[start:stop].strip()])


@pytest.mark.parametrize(("length", "prompt"), [(300, 100), (1600, 1590)])
def test_a_plan_without_room(length, prompt, writer):
    with pytest.raises(ValueError, match=f"length={length} and prompt={prompt} leave no room for codes"):
        known_tasks.codes(writer, np.random.default_rng(0), Plan(length, prompt), 0)


# Points --------------------------------------------------------------------------------------------------------------


def test_every_method_is_measured_at_every_budget_with_the_authors_options():
    sizes = DecoderConfig(num_attention_heads=9, num_key_value_heads=3, head_dim=64, num_hidden_layers=30)
    made = known_accuracy.points(LONG)
    for pair in discovery.built_in():
        of_pair = [one for one in made if one.pair == pair]
        assert {one.divisor for one in of_pair} == set(shares_of(pair, LONG.shares))
        assert {one.task for one in of_pair} == set(LONG.tasks)
    assert {one.name for one in made} >= {FULL, "tova (per_head=False)", "vatp (sinks=20)"}
    assert len({str(one) for one in made}) == len(made)
    for one in made:
        if one.pair is not None:                                            # no config refuses a budget
            plan = LONG.tasks[one.task]
            config_of(one.pair, sizes, plan.length, one.divisor, plan.block_size, one.options)
    assert made[-1].name.startswith("epikv")


# Intervals -----------------------------------------------------------------------------------------------------------


def test_intervals():
    ones = np.ones(10)
    # Wilson's interval of 8 of 10, from its formula: some ten operations, each rounded once.
    z, p, n = float(norm.ppf(0.975)), 0.8, 10
    middle, half = p + z * z / 2 / n, z * (p * (1 - p) / n + z * z / 4 / n / n) ** 0.5
    expected = [(middle + sign * half) / (1 + z * z / n) for sign in (-1, 1)]
    found = known_plot.interval(np.array([1] * 8 + [0] * 2), ones)
    assert found == pytest.approx(expected, abs=16 * np.finfo(float).eps)
    low, high = known_plot.interval(np.array([5, 0] * 5), 5 * ones)         # all or nothing: as wide as for 10 answers
    assert low < 0.25
    assert high > 0.75
    assert known_plot.bootstrap(ones, ones) == (1, 1)


def test_answers_are_counted_by_part():
    asked = [known_tasks.Asked("codes", part, np.zeros(9), answers) for part, answers in
             (("a", ((4, 6), (6, 8))), ("b", ((4, 5),)), ("a", ((8, 9),)))]  # fmt: skip
    hits = [torch.tensor(hit, dtype=torch.bool) for hit in ([1, 0, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0])]
    found = known_accuracy.results(asked, hits, [], 4)
    assert (found["right"], found["answers"], found["accuracy"]) == (2, 4, 0.5)
    assert found["parts"] == {"a": [1, 3], "b": [1, 1]}


# Runs ----------------------------------------------------------------------------------------------------------------


def _main(out: Path, *arguments: str) -> int:
    return cli.main(["accuracy", "--model", "known", "--out", str(out), *arguments])


def _rows(out: Path) -> list[dict[str, Any]]:
    return known_accuracy.read(out / known_accuracy.RESULTS)


def _rounding(logits: torch.Tensor) -> float:
    """How far the perplexity may be, relatively, from that of exact arithmetic on these logits: `follow` rounds them to
    float32 and takes their cross entropy, a sum over the vocabulary, in float32."""
    return (2 * float(logits.abs().max()) + logits.shape[-1] + 4) * 2.0**-24


def test_a_run_goes_on_where_it_ended(tmp_path, capsys, monkeypatch):
    measure, seen = Run.measure, []
    monkeypatch.setattr(known, "load", lambda where, dtype: (load_model(torch.float64, where), Bytes()))

    def counted(run: Run, point: Any) -> dict[str, Any]:
        seen.append(str(point))
        if len(seen) == 2:
            raise known_accuracy.OutOfTime
        return measure(run, point)

    monkeypatch.setattr(Run, "measure", counted)
    assert _main(tmp_path, "h2o", "--only", "perplexity") == 0
    assert "the time is over: 2 of 3 points are left" in capsys.readouterr().err
    with (tmp_path / known_accuracy.RESULTS).open("a") as file:
        file.write('{"point": "cut o')
    assert _main(tmp_path, "h2o", "--only", "perplexity") == 0
    assert seen == [
        f"perplexity 2048, {name}" for name in (f"{FULL}, 1/1", "h2o, 1/1", "h2o, 1/1", "h2o, 1/4")
    ]
    full, whole, quarter = _rows(tmp_path)
    assert [row["share"] for row in (full, whole, quarter)] == ["1", "1", "1/4"]
    run = Run(known_accuracy.SHORT, "reference", "cpu", "float64")
    logits = run.loaded[0](torch.from_numpy(np.stack([one.tokens for one in run.asked("perplexity 2048")])))
    assert whole["perplexity"] == pytest.approx(full["perplexity"], rel=2 * _rounding(logits))
    assert whole["bytes_held"] == full["bytes_held"] > 3 * quarter["bytes_held"]
    assert "h2o" in (tmp_path / "h2o.txt").read_text()
    for name in ("h2o.svg", "accuracy.svg"):
        plot = ElementTree.parse(tmp_path / name)
        assert "Accuracy over bytes held: perplexity 2048" in "".join(plot.getroot().itertext())
    assert _main(tmp_path, "h2o", "--only", "perplexity") == 0
    assert len(seen) == 4

    for arguments in (["--prompts", "2"], ["--dtype", "bfloat16"]):
        with pytest.raises(SystemExit):
            _main(tmp_path, "h2o", "--only", "perplexity", *arguments)
        assert "measured with other prompts" in capsys.readouterr().err


def test_the_limit_stops_between_batches():
    run = Run(known_accuracy.SHORT, "reference", "cpu", "float32", deadline=0.0)
    with pytest.raises(known_accuracy.OutOfTime):
        run.measure(known_accuracy.points(run.form)[0])


def test_perplexity_is_that_of_the_model():
    run = Run(known_accuracy.SHORT, "reference", "cpu", "float64")
    full = next(one for one in known_accuracy.points(run.form) if one.task == "perplexity 2048")
    row, asked = run.measure(full), run.asked(full.task)
    tokens = torch.from_numpy(np.stack([one.tokens for one in asked]))
    logits = run.loaded[0](tokens)
    chance = logits.log_softmax(-1)[:, 131:-1].gather(-1, tokens[:, 132:, None])
    assert row["perplexity"] == pytest.approx(float((-chance.mean()).exp()), rel=_rounding(logits))
    assert row["low"] <= row["perplexity"] <= row["high"]


@pytest.mark.parametrize(("arguments", "says"), [
    (["longflw"], "no method 'longflw': did you mean longflow?"),
    (["--only", "nothing"], "no point has 'nothing' in its name: --list shows them"),
    (["--prompts", "0"], "expected an integer from 1"),
    (["--model", "unknown"], "invalid choice: 'unknown'"),
])
def test_wrong_arguments_are_one_line(arguments, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        _main(tmp_path, *arguments)
    said = capsys.readouterr().err
    assert error.value.code == 2
    assert says in said
    assert said.count("\n") == 1


def test_a_missing_model_is_one_line(tmp_path, capsys, monkeypatch):
    def missing(*_: object) -> None:
        raise known.KnownModelError("not installed")

    monkeypatch.setattr(known, "load", missing)
    with pytest.raises(SystemExit):
        _main(tmp_path, "h2o")
    assert capsys.readouterr().err == "kvtwin accuracy: error: not installed (--help explains the options)\n"


def test_a_method_that_refuses_the_budget_is_left_out(tmp_path, capsys):
    assert _main(tmp_path, "pm_kvq", "--only", "perplexity") == 0
    assert "left out: perplexity 2048, pm_kvq, 1/1: bits = 4 is too small" in capsys.readouterr().err
    assert [row["method"] for row in _rows(tmp_path)] == [FULL]


def test_list_needs_no_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(known, "load", None)
    assert _main(tmp_path / "new", "kivi", "--list") == 0
    assert capsys.readouterr().out.splitlines()[0] == f"codes, {FULL}, 1/1"
    assert not (tmp_path / "new").exists()


# Graphs --------------------------------------------------------------------------------------------------------------


#: What the host counts only for graphs.
SCHEDULE = ("may_replay", "reset_last")


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("method", ["h2o", "longflow", "kivi", "quest", "cake", "synckv"])
def test_replayed_steps_have_the_bits_of_plain_ones(method, device):
    """On the CPU with a stand-in for graphs."""
    from kvtwin.fixtures.accuracy import follow
    from kvtwin.optimized.hf._host import parts
    from kvtwin.optimized.hf.steps import replayed

    form = replace(known_accuracy.SHORT, tasks={"perplexity 2048": Plan(24, 19, 10)}, count=1)
    run, found, attends = Run(form, "optimized", str(device), "float32"), [], []
    point = known_accuracy.points(form, [method])[-1]
    model, tokens = run.loaded[0], torch.from_numpy(run.asked("perplexity 2048")[0].tokens)[None].to(device)
    for wraps in (False, True):
        attend, block = run.attend(point)[0](1), run.attend(point)[1]
        attends.append(attend)
        counted: list[int] = []

        def wrap(step: Any, attend: Any = attend, wraps: bool = wraps, counted: list[int] = counted) -> Any:
            def count(new: Any, at: int) -> Any:
                counted.append(at)
                return step(new, at)

            def forward(new: Any, at: Any) -> Any:
                return model(new, start=at, attend=attend, only_last=True)

            return replayed(forward, attend)(count) if wraps else count

        found.append((*follow(model, tokens, attend, 19, block, wrap), len(counted)))
    assert found[1][2] == 1 < found[0][2]                                    # one step ran as it is
    assert all(torch.equal(one, other) for one, other in zip(found[0][:2], found[1][:2], strict=True))
    for mine, other in zip(*map(parts, attends), strict=True):              # and the host knows the same
        numbers = [{name: value for name, value in vars(one).items() if isinstance(value, int) and name not in SCHEDULE}
                   for one in (mine, other)]  # fmt: skip
        assert numbers[0] == numbers[1]
