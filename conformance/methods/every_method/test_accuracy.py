"""The table of accuracy over budget: its questions, its counts, and that the stored table agrees with its plot."""

from __future__ import annotations

import hashlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape

from kvtwin.conformance import discovery
from kvtwin.conformance.harness.page import details, page
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.lab.docs_source import docs_module
from kvtwin.conformance.lab.report_sample import sample
from kvtwin.fixtures import accuracy, accuracy_plot, counterfactual, needle, plotting, tasks
from kvtwin.fixtures.accuracy import FULL, Plan
from kvtwin.fixtures.accuracy_caches import States, config_of, head_clusters, maker, shares_of, training_documents, way
from kvtwin.fixtures.decoder import DecoderConfig, frequencies
from kvtwin.fixtures.load import load_bytes, load_model
from kvtwin.fixtures.stored import stored_result
from kvtwin.reference.baselines.h2o import H2OConfig, H2OState
from kvtwin.reference.longflow import LongFlowConfig, LongFlowState
from kvtwin.reference.thinkv import ThinKVConfig, ThinKVState

pytestmark = pytest.mark.whole

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Tiny(Plan):
    length: int = 120
    prompt: int = 96
    block_size: int = 48
    shares: tuple[int, ...] = (1, 6)
    queries: int = 2


@pytest.fixture(scope="module")
def tiny(device: torch.device) -> dict[str, Any]:
    """A run over a few bytes. It uses the kernels only on a GPU, as the interpreter would take minutes."""
    side = "optimized" if device.type == "cuda" else "reference"
    return accuracy.evaluate(Tiny(), side=side, device=str(device), methods=["epikv", "h2o", "longflow", "synckv"])


# Questions -----------------------------------------------------------------------------------------------------------


def test_answers_follow_the_context_and_match_their_task() -> None:
    kinds = {"recall": tasks.ANSWER, "arithmetic": tasks.WORKING}
    found = accuracy.questions(Plan(queries=30))
    for task, kind in kinds.items():
        of_task = [one for one in found if one.task == task]
        assert sum(len(one.answers) for one in of_task) >= 30
        for one in of_task:
            for start, stop in one.answers:
                assert 896 <= start < stop <= 1024
                assert set(one.document.kinds[start:stop].tolist()) == {kind}
                for edge in (start - 1, stop):                              # whole answers: steps end with a space
                    ended = edge == 1024 or one.document.kinds[edge] != kind
                    assert ended or (task == "arithmetic" and one.document.tokens[edge] == ord(" "))


def test_recalled_pairs_are_in_the_context() -> None:
    sources = [query.source for one in accuracy.questions(Plan(queries=60)) for query in one.document.queries]
    assert max(sources) < 896
    quarters = np.bincount(np.array(sources) * 4 // 896)
    assert (quarters > 0).all(), f"every quarter of the context must be asked about, got counts {quarters.tolist()}"


def test_the_same_plan_asks_the_same() -> None:
    one, other, third = (accuracy.questions(Plan(queries=5, seed=seed)) for seed in (0, 0, 1))
    assert [a.document.tokens.tobytes() for a in one] == [b.document.tokens.tobytes() for b in other]
    assert one[0].document.tokens.tobytes() != third[0].document.tokens.tobytes()


def test_a_plan_without_room_for_answers() -> None:
    with pytest.raises(ValueError, match="length=100 leaves no room for answers"):
        accuracy.questions(Plan(length=100, prompt=99, queries=1))


def test_a_checker_says_with_which_options_its_method_is_measured() -> None:
    pair = next(pair for pair in discovery.methods() if pair.name == "lazy_eviction")
    config, _ = config_of(pair, DecoderConfig(), 1024, 4, 128)
    assert (config.budget, config.recent, config.alpha) == (256, 64, 0.005)


# Counts --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.slow
def test_with_room_for_all_every_method_is_full_attention(tiny: dict[str, Any]) -> None:
    full, *others = (row for row in tiny["rows"] if row["budget"] == 120)
    assert full["method"] == FULL
    assert [row["method"] for row in others] == ["epikv", "h2o", "longflow", "synckv"]
    for row in others:
        assert row["tasks"] == full["tasks"]
        if row["method"] != "synckv":                                       # counts chosen tokens, without the newest
            assert row["tokens_held"] == full["tokens_held"] == 119         # the last byte is predicted, not read
            assert row["bytes_held"] == full["bytes_held"] == full["bytes_allocated"] or row["method"] == "epikv"


@pytest.mark.slow
def test_rows_are_consistent(tiny: dict[str, Any]) -> None:
    for row in tiny["rows"]:
        per_token = 8 * 4 * 32 * 2 * 4                                      # layers, KV heads, head_dim, K and V, bytes
        assert row["bytes_nominal"] == row["budget"] * per_token
        assert row["bytes_held"] == row["tokens_held"] * per_token
        assert row["bytes_held"] <= row["bytes_allocated"]
        for one in row["tasks"].values():
            assert one["accuracy"] == one["right"] / one["queries"]
            assert one["queries"] >= 2
        assert row["made_by"]["side"] in accuracy.SIDES
    small = [row for row in tiny["rows"] if row["share"] != "1"]
    assert [row["share"] for row in small] == ["1/6", "1/6", "1/6", "3/8"]
    # One of four heads attends to all 119 tokens, the others to 20 chosen ones.
    assert [row["tokens_held"] for row in small] == [20, 20, 20, (119 + 3 * 20) / 4]
    assert [row["prompt"] for row in small] == ["decoded", "blocks", "one pass", "one pass"]


def test_every_method_is_asked_within_its_budget() -> None:
    """If a method would keep the whole prompt, its tokens are decoded one by one. The share follows from the config."""
    sizes = DecoderConfig()
    for pair in discovery.built_in():
        for divisor in shares_of(pair, Plan().shares):
            config, held = config_of(pair, sizes, 1024, divisor, 128)
            for name, budget in checkers.with_budget(pair.name, 1024 // divisor).items():
                assert getattr(config, name) == budget
            if pair.name != "synckv":
                assert held == Fraction(1, divisor)
            else:
                heads = sizes.num_key_value_heads
                assert held * heads == config.clusters + (heads - config.clusters) * Fraction(1, divisor)
    ways = {pair.name: way(pair, 896, 128) for pair in discovery.built_in()}
    assert (ways["epikv"].name, ways["epikv"].block) == ("decoded", 1)
    assert (ways["thinkv"].name, ways["thinkv"].block) == ("one pass", 896)
    assert (ways["h2o"].name, ways["h2o"].block) == ("blocks", 128)


def test_head_clusters_are_those_of_other_documents() -> None:
    model = load_model(torch.float32, "cpu")
    found = head_clusters(model, training_documents(64), 1)
    assert len(found) == model.config.num_hidden_layers
    assert all(len(clusters.labels) == 4 and len(clusters.representatives) == 1 for clusters in found)
    assert found == head_clusters(model, training_documents(64), 1)


@pytest.mark.parametrize(
    ("make", "in_blocks", "slots"),
    [
        (lambda **sizes: H2OState(H2OConfig(4, block_size=3), **sizes), True, 7),
        (lambda **sizes: LongFlowState(LongFlowConfig(4), **sizes), False, 4),
        (lambda **sizes: LongFlowState(LongFlowConfig(4, per_head=True), **sizes), False, 4),
    ],
)
def test_held_bytes_are_those_of_the_tensors(make: Any, in_blocks: bool, slots: int) -> None:
    sizes = {"batch": 2, "query_heads": 4, "key_value_heads": 2, "head_dim": 16, "dtype": torch.float16}
    states = States(lambda: make(**sizes, device="cpu"), in_blocks)
    tokens = [torch.randn(2, heads, 6, 16, dtype=torch.float16) for heads in (4, 2, 2)]
    for layer in range(3):
        states(layer, *(tensor[:, :, :5] for tensor in tokens))
        states(layer, *(tensor[:, :, 5:] for tensor in tokens))
    found = states.memory()
    assert found["tokens_held"] == 4
    assert found["bytes_held"] == 3 * 2 * 4 * 16 * 2 * 2                    # layers, heads, tokens, D, K and V, bytes
    keys_and_values = 3 * 2 * slots * 16 * 2 * 2
    assert keys_and_values < found["bytes_allocated"] < 2 * keys_and_values
    states.layers[0].hoard = torch.zeros(2, 1000)                           # private tensors are counted
    assert states.memory()["bytes_allocated"] == found["bytes_allocated"] + 4000
    states.layers[0].view = states.layers[0].key[:1]                        # and views are not counted again
    assert states.memory()["bytes_allocated"] == found["bytes_allocated"] + 4000


def test_held_bytes_of_a_paged_cache_are_its_own() -> None:
    """16 tokens with 4 bits and their scales, and one token in the buffer."""
    config = ThinKVConfig(64, tau=16, max_tokens=64)
    states = States(lambda: ThinKVState(
        config, batch=2, query_heads=4, key_value_heads=2, head_dim=16, dtype=torch.float16, device="cpu"
    ), False)
    tokens = [torch.randn(2, heads, 17, 16, dtype=torch.float16) for heads in (4, 2, 2)]
    for layer in range(3):
        states(layer, *(tensor[:, :, :16] for tensor in tokens))
        states(layer, *(tensor[:, :, 16:] for tensor in tokens))
    found = states.memory()
    assert found["tokens_held"] == 17
    # Per layer and KV head: keys and values of 16 channels with half a byte each, and scales of one byte per channel of
    # the keys and per token of the values.
    assert found["bytes_held"] == 3 * 2 * (2 * 16 * 16 / 2 + 16 + 16 + 2 * 16 * 2)
    assert found["bytes_allocated"] > found["bytes_held"]


def test_the_standard_error_is_over_documents() -> None:
    """If documents have equally many answers, it is the standard error of the mean of their shares."""
    found = accuracy.share([(3, 4), (0, 4), (4, 4), (1, 4)])                # shares with mean 1/2 and variance 5/24
    assert found["accuracy"] == 0.5
    assert abs(found["standard_error"] ** 2 - 5 / 24 / 4) < 2**-52
    assert (found["right"], found["queries"], found["documents"]) == (8, 16, 4)
    assert accuracy.share([(1, 2)])["standard_error"] is None
    assert accuracy.share([(2, 2), (5, 5)])["standard_error"] == 0


# Table and plot ------------------------------------------------------------------------------------------------------


def check_table(result: dict[str, Any]) -> None:
    """Assert that the numbers in the text equal those in the JSON, to the digits shown."""
    lines = accuracy_plot.table(result).split("\n\n")[0].splitlines()
    assert len(lines) == 1 + len(result["rows"])
    for line, row in zip(lines[1:], result["rows"], strict=True):
        method, rest = line[: len(row["method"])], line[len(row["method"]) :].replace("±", " ").split()
        measured = iter(rest[5:])
        assert method == row["method"]
        assert rest[:2] == [str(row["budget"]), row["share"]]
        for shown, name in zip(rest[2:5], ("bytes_nominal", "bytes_held", "bytes_allocated"), strict=True):
            assert abs(int(shown) - row[name] / 1024) <= 0.5
        for one in row["tasks"].values():
            assert abs(float(next(measured)) - 100 * one["accuracy"]) <= 0.0501
            if one["standard_error"] is not None:
                assert abs(float(next(measured)) - 100 * one["standard_error"]) <= 0.0501
        assert next(measured, None) is None


def check_svg(result: dict[str, Any]) -> None:
    """Assert that the plot is well-formed and self-contained, with a line per method and task through its points."""
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    text = accuracy_plot.svg(result)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert not {"href", "src", "script"} & set(text.replace("=", " ").replace("<", " ").split())
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "line"]
    lines = [path.get("d") or "" for group in groups for path in group.iter(f"{SVG}path")]
    grid = [path.get("d") or "" for path in root.iter(f"{SVG}path") if path.get("stroke-opacity") == "0.25"]
    full, *_, none = sorted({float(line.split()[-1]) for line in grid})
    assert len(grid) == 5 * len(result["rows"][0]["tasks"])
    names = list(dict.fromkeys(row["method"] for row in result["rows"]))
    tasks_of = list(result["rows"][0]["tasks"])
    assert len(lines) == len(names) * len(tasks_of)
    for line, (task, name) in zip(lines, ((task, name) for task in tasks_of for name in names), strict=True):
        heights = [float(point.split()[1]) for point in line.removeprefix("M ").split(" L ")]
        expected = [row["tasks"][task]["accuracy"] for row in result["rows"] if row["method"] == name]
        expected = expected * 2 if len(expected) == 1 else expected
        for height, share in zip(heights, expected, strict=True):
            assert abs(none + (full - none) * share - height) <= 0.0501
    shown = [text.text for text in root.iter(f"{SVG}text")]
    marked = {row["share"] for row in result["rows"] if Fraction(row["share"]).numerator == 1}
    assert {*names, *tasks_of, *marked} <= set(shown)


@pytest.mark.slow
def test_table_and_plot_show_the_numbers(tiny: dict[str, Any]) -> None:
    assert json.loads(json.dumps(tiny)) == tiny
    check_table(tiny)
    check_svg(tiny)


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found = stored_result("accuracy")
    assert found is not None, "fixtures/accuracy.json and .svg: see python -m kvtwin.fixtures.accuracy --help"
    return found[0]


def test_the_stored_result_is_whole_and_is_what_is_drawn(stored: dict[str, Any]) -> None:
    """It was measured with the current plan and model, for every budget of every method, and the plot shows it."""
    assert json.loads(json.dumps(asdict(Plan()))) == stored["plan"]
    assert stored["schema_version"] == accuracy_plot.SCHEMA_VERSION
    assert stored["model_sha256"] == hashlib.sha256(load_bytes("model/model.safetensors")).hexdigest()
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in stored["rows"]:
        rows.setdefault(row["method"], []).append(row)
    (full,) = rows.pop(FULL)
    pairs = {pair.name: pair for pair in discovery.built_in()}
    settings = {
        name: (pair.name, chosen) for pair in pairs.values() for name, chosen in accuracy.settings(pair).items()
    }
    assert rows.keys() == settings.keys()
    assert settings["vatp (sinks=20)"] == ("vatp", {"sinks": 20})
    assert settings["streaming_llm (rerotate_keys=True)"] == ("streaming_llm", {"rerotate_keys": True})
    for name, of_method in rows.items():
        method, chosen = settings[name]
        configs, shares = zip(*(
            config_of(pairs[method], DecoderConfig(), 1024, share, 128, chosen)
            for share in shares_of(pairs[method], Plan().shares)
        ), strict=True)
        assert [row["budget"] for row in of_method] == [1024 * share for share in shares]
        assert [row["share"] for row in of_method] == list(map(str, shares))
        assert {row["prompt"] for row in of_method} == {way(pairs[method], 896, 128).name}
        for row, config in zip(of_method, configs, strict=True):
            assert all(one["queries"] >= 100 for one in row["tasks"].values())
            assert row["made_by"].keys() == {"side", "device", "python", "torch"}
            if not checkers.ask(method, "LOSSY", False):
                evicts = checkers.ask(method, "EVICTS", True)
                if evicts or row["tokens_held"] != 1023:  # a method that evicts nothing may hold all tokens
                    # An offloading method counts its last choice, which is at least one step old, without the newest
                    # tokens.
                    # The incomplete page of a cache with pages comes on top of its budget.
                    most = min(getattr(config, "capacity", row["budget"]), 1023)
                    assert row["budget"] - 3 <= row["tokens_held"] <= most
                    assert row["tokens_held"] == most or not evicts
                assert row["budget"] < 1024 or row["tasks"] == full["tasks"], f"{method} must keep all tokens"
    check_table(stored)
    check_svg(stored)
    assert stored_result("accuracy") == (stored, accuracy_plot.svg(stored))


def test_the_docs_show_the_stored_table(stored: dict[str, Any]) -> None:
    generate = docs_module("generate", "its pages show the table")
    text = accuracy_plot.markdown(stored)
    assert text in generate.results.accuracy_page()
    lines = text.splitlines()
    (h2o,) = (line for line in lines if line.startswith("| h2o |"))
    half = next(row for row in stored["rows"] if row["method"] == "h2o" and row["share"] == "1/2")
    assert h2o.split(" | ")[2] == " / ".join(f"{100 * half['tasks'][task]['accuracy']:.0f}" for task in half["tasks"])
    for method in {row["method"] for row in stored["rows"]} - {FULL}:
        shown = generate.methods.accuracy(method.split(" (")[0]).splitlines()
        assert [line for line in shown if line.startswith(f"| {method} |")] == [
            line for line in lines if line.startswith(f"| {method} |")
        ]
        # Header, rule, full attention, and the method with each of its settings.
        settings = {row["method"] for row in stored["rows"] if row["method"].split(" (")[0] == method.split(" (")[0]}
        assert sum(line.startswith("|") for line in shown) == 3 + len(settings)
    assert generate.methods.accuracy("no method") == "Not measured.\n"


def test_the_report_has_the_stored_plot_and_table(stored: dict[str, Any]) -> None:
    shown = page(sample([], implementation=None))
    assert stored_result("accuracy")[1] in shown
    for row in accuracy_plot.cells(stored):
        assert all(escape(cell) in shown for cell in row)


def test_the_plot_is_of_well_formed_text_whatever_the_names() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    row = {"budget": 8, "share": "1", "method": "a<b&c", "tasks": {"x>y": {"accuracy": 0.5, "standard_error": None}}}
    root = ElementTree.fromstring(accuracy_plot.svg({"rows": [row]}))
    assert {"a<b&c", "x>y"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_a_tree_without_a_stored_result_has_no_part_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "stored_result", lambda name: None)
    assert details.stored_results() == []


# The command line ----------------------------------------------------------------------------------------------------


def test_states_that_rotate_get_vectors_without_rotation() -> None:
    """In the first layer, equal bytes then have equal keys wherever they are. Otherwise they have not."""
    (pair,) = (pair for pair in discovery.built_in() if pair.name == "streaming_llm")
    model, tokens = load_model(torch.float32), torch.full((1, 8), 65)
    for chosen, equal in (({}, False), ({"rerotate_keys": True}, True)):
        config, _ = config_of(pair, model.config, 1024, 8, 128, chosen)
        attend = maker(pair, pair.reference, config, model, 1024)(1)
        with torch.no_grad():
            model(tokens, attend=attend)
        key = attend.layers[0].key[0, :, :8]
        assert torch.equal(key, key[:, :1].expand_as(key)) == equal
    assert config.inv_freq == tuple(frequencies(model.config).tolist())


@pytest.mark.parametrize(("module", "argument"), [
    (accuracy, "--svg=a.svg"), (needle, "--svg=a.svg"), (counterfactual, "--store"),
])  # fmt: skip
def test_without_matplotlib_no_plot_is_promised(module: Any, argument: str, monkeypatch: Any, capsys: Any) -> None:
    """The measurement takes minutes, so it does not begin."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        module.main([argument])
    assert plotting.MISSING in capsys.readouterr().err


@pytest.mark.slow
def test_a_method_alone_is_put_into_the_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(accuracy, "Plan", Tiny)
    out, plot = tmp_path / "accuracy.json", tmp_path / "accuracy.svg"
    arguments = ["--queries", "1", "--out", str(out), "--svg", str(plot)]
    assert accuracy.main([*arguments, "--method", "random"]) == 0
    first = json.loads(out.read_text(encoding="utf-8"))
    assert accuracy.main([*arguments, "--method", "snapkv"]) == 0
    both = json.loads(out.read_text(encoding="utf-8"))
    assert [row["method"] for row in both["rows"]] == [FULL, "random", "random", "snapkv", "snapkv"]
    assert [row for row in both["rows"] if row["method"] == "random"] == first["rows"][1:]
    assert plot.read_text(encoding="utf-8") == accuracy_plot.svg(both)
    assert "| random |" in accuracy_plot.markdown(both)
    printed = capsys.readouterr()
    assert accuracy_plot.table(both) in printed.out
    assert "snapkv, budget 20: recall" in printed.err
    first["plan"]["seed"] = 7
    out.write_text(json.dumps(first), encoding="utf-8")
    with pytest.raises(SystemExit):
        accuracy.main([*arguments, "--method", "random"])
    assert "plan is" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--queries", "0"], ["--method", "none"], ["--side", "left"]])
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        accuracy.main(arguments)
    assert error.value.code == 2
