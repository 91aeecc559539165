"""The experiment perf/headline/generate.py: what it measures next, what it keeps, and a run of a tiny model."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.tool.perf_source import PERF, perf_module

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

generate, base, rows_of, plots_of = (perf_module(f"headline.{name}") for name in ("generate", "base", "rows", "page"))

SHAPE = generate.Shape(1, 12)
PLAN = generate.Plan(("Qwen3-8B",), (SHAPE, generate.Shape(2, 12)), ("DynamicCache", "LongFlow"), rounds=2)


def row(system="LongFlow", shape=SHAPE, ms=1.0, **more):
    return {
        "model": "Qwen3-8B", "shape": str(shape), "system": system, "seconds_to_first_token": 2.0, "ms_per_token": ms,
        "peak_bytes": 3, "reasons": [], "tokens": "a", "seconds_of_first_call": 4.0, **more,
    }


class Model:
    class config:
        vocab_size = 96


@pytest.fixture
def calls(monkeypatch):
    """The systems that are measured, of which CAKE does not fit."""
    found = []

    def one(model, system, ids, steps, *, tiny):
        found.append((system, tuple(ids.shape)))
        if system == "CAKE":
            raise torch.cuda.OutOfMemoryError("too much\nof it")
        made = row(system, ms=float(len(found)))
        return {name: made[name] for name in made.keys() - {"model", "shape", "system", "seconds_of_first_call"}}

    monkeypatch.setattr(generate, "one", one)
    monkeypatch.setattr(generate, "build", lambda *_, **__: Model)
    return found


def test_rounds_are_interleaved_and_a_first_call_counts_for_nothing(tmp_path, calls):
    path = tmp_path / "generate.jsonl"
    assert generate.measure(PLAN, path, torch.device("cpu"))
    first, later = ["DynamicCache"] * 2 + ["LongFlow"] * 2, ["DynamicCache", "LongFlow"]
    assert calls == [(name, shape) for shape in ((1, 12), (2, 12)) for name in first + later]
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["ms_per_token"] for one in kept] == [2, 4, 5, 6, 8, 10, 11, 12]
    assert ["seconds_of_first_call" in one for one in kept[:2]] == [True, True]


def test_a_run_goes_on_where_another_ended(tmp_path, calls, capsys):
    path = tmp_path / "generate.jsonl"
    assert not generate.measure(PLAN._replace(limit=-1), path, torch.device("cpu"))
    assert not calls
    path.write_text("".join(json.dumps(row(name)) + "\n" for name in ("DynamicCache", "LongFlow")) + '{"model": "Qw')
    path.write_text(path.read_text() + "\n")
    assert generate.measure(PLAN._replace(shapes=(SHAPE,)), path, torch.device("cpu"))
    assert [name for name, _ in calls] == ["DynamicCache"] * 2 + ["LongFlow"] * 2
    assert generate.measure(PLAN._replace(shapes=(SHAPE,)), path, torch.device("cpu"))
    assert len(calls) == 4, "all is measured"


def test_what_does_not_fit_is_tried_once(tmp_path, calls):
    run = base.Run("generate", tmp_path, "cpu", tiny=True)
    generate.run(run, PLAN._replace(systems=("CAKE", "LongFlow"), shapes=(SHAPE,)))
    assert [name for name, _ in calls].count("CAKE") == 1
    assert run.complaints == ["Qwen3-8B 1x12 CAKE: OutOfMemoryError: too much"]
    figures = run.figures["Qwen3-8B 1x12"]
    assert figures["CAKE"] == {"error": "OutOfMemoryError: too much"}
    assert figures["LongFlow"]["rounds"] == 2


def test_figures_are_medians_over_rounds():
    found = generate.medians([row(ms=ms) for ms in (9.0, 1.0, 2.0)] + [row("CAKE", error="no")])["Qwen3-8B 1x12"]
    assert found["LongFlow"] == {
        "seconds_to_first_token": 2.0, "ms_per_token": 2.0, "peak_bytes": 3, "seconds_of_first_call": 4.0, "rounds": 3,
    }
    assert found["CAKE"] == {"error": "no"}
    (cell,) = (one[2] for one in rows_of.rows({"experiments": {"generate": {"figures": {"Qwen3-8B 1x12": {
        "DynamicCache": {"ms_per_token": 40.0}, "LongFlow": {"ms_per_token": 20.0}, "CAKE": {"error": "no"},
        "LongFlow, captured": {"ms_per_token": 8.0},
    }}}}}))
    assert cell == "Qwen3-8B 1x12: DynamicCache 40.0 ms, LongFlow, captured 8.00 ms"


def test_other_tokens_and_steps_without_graphs_are_complaints():
    good = [row(), row("LongFlow, captured"), row("DynamicCache", tokens="b")]
    assert generate.wrong(good) == []
    wrong = generate.wrong([*good, row("LongFlow, captured", tokens="b"), row("CAKE, captured", reasons=["none"])])
    assert wrong == [
        "Qwen3-8B 1x12: LongFlow: captured steps give other tokens than eager ones",
        "Qwen3-8B 1x12 CAKE, captured: none",
    ]


@pytest.mark.parametrize(("text", "shape"), [("1x32K", (1, 32768)), ("64x4096", (64, 4096)), ("3x5", (3, 5))])
def test_shapes_are_read_and_written(text, shape):
    assert generate.shape_of(text) == shape
    assert generate.shape_of(str(generate.Shape(*shape))) == shape


@pytest.mark.parametrize("text", ["", "1", "x", "1x", "1x-2", "axb", "1x2M"])
def test_bad_shapes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected ROWSxTOKENS, such as 1x32K"):
        generate.shape_of(text)


def test_compiled_steps_are_measured_where_generate_compiles(device):
    pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")
    model = generate.build("Qwen3-8B", device, tiny=True)
    found = {
        name: generate.cache_of(name, model, 8192, tiny=name == "EpiKV").is_compileable for name in generate.CACHES
    }
    assert {name for name, compiles in found.items() if not compiles} == generate.NOT_COMPILEABLE
    compiled = {name.removesuffix(generate.COMPILED) for name in generate.SYSTEMS if name.endswith(generate.COMPILED)}
    assert compiled == found.keys() - generate.NOT_COMPILEABLE | {"StaticCache"}


def test_what_is_compiled_is_compiled_again_in_each_round(tmp_path, calls):
    """PyTorch forgets it after each measurement, which has a first call therefore."""
    plan = PLAN._replace(shapes=(SHAPE,), systems=("LongFlow", "LongFlow, compiled"))
    assert generate.measure(plan, tmp_path / "generate.jsonl", torch.device("cpu"))
    plain, compiled = ["LongFlow"], ["LongFlow, compiled"] * 2
    assert [system for system, _ in calls] == plain * 2 + compiled + plain + compiled


def test_every_cache_of_the_optimized_side_is_measured():
    methods = {pair.state.__name__.removesuffix("State") for pair in discovery.built_in() if pair.state is not None}
    assert set(generate.CACHES) == methods


def test_a_tiny_model(tmp_path, device):
    pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")
    run = base.Run("generate", tmp_path, device, tiny=True)
    generate.run(run, generate.TINY_PLAN)
    assert run.complaints == []
    figures = run.figures["Qwen3-8B 1x12"]
    assert list(figures) == ["DynamicCache", "StaticCache, compiled", "LongFlow", "LongFlow, captured"]
    assert all(one["ms_per_token"] > 0 and one["seconds_to_first_token"] > 0 for one in figures.values())
    assert plots_of.panels({"experiments": {"generate": {"figures": run.figures}}})


def test_the_time_of_the_host(device, capsys):
    pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")
    if device.type != "cpu":
        pytest.skip("kernels are replaced in Triton's interpreter only")
    host = perf_module("host")
    assert host.main(["LongFlow", "ThinKV"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in lines] == ["LongFlow", "ThinKV"]
    assert all(float(median) >= float(least) > 0 for _, median, least in lines)
    for times in host.captured_steps("EpiKV", layers=4, steps=12):
        assert min(times) > 0
    with pytest.raises(SystemExit):
        host.main(["Other"])
    assert "unknown: Other; known: CAKE, " in capsys.readouterr().err
