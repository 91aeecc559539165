"""The runner that measures planted faults and false alarms: its bookkeeping, and verdicts in forks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance.lab.docs_source import docs_module
from kvtwin.conformance.lab.implementations import planting, right
from kvtwin.conformance.lab.implementations.faults import FAULTS
from kvtwin.conformance.lab.mutation import power


def record(name: str, seed: int, verdict: str, kind: str = power.FAULTS, device: str = "cpu", **more: Any) -> dict:
    made = {"tests": 3, "cases": 10 * seed, "seconds": 0.5}
    return {"key": json.dumps([device, kind, name, seed]), "seed": seed, "verdict": verdict, **made, **more}


def test_the_orders_are_those_of_the_names_and_seeds():
    made = power.orders([power.FAULTS, power.RIGHT], ["row-10", "snapkv loops"], range(2, 4), "cpu")
    assert [json.loads(order.key) for order in made] == [
        ["cpu", "faults", "row-10", 2], ["cpu", "right", "snapkv loops", 2],
        ["cpu", "faults", "row-10", 3], ["cpu", "right", "snapkv loops", 3],
    ]  # fmt: skip
    fault, other = made[2], made[3]
    assert (fault.method, fault.seed, fault.fits) == ("longflow", 3, ())
    assert fault.environ == {planting.NAME: "row-10", planting.SEED: "3"}
    assert (other.method, other.fits, other.environ) == ("snapkv", None, {})
    assert other.module.endswith(".right.loops")
    everything = power.orders([power.FAULTS, power.RIGHT], None, range(1, 3), "cuda")
    of_styles = sum(len(style.methods) for style in right.RIGHT.values())
    assert len({order.key for order in everything}) == len(everything) == 2 * (len(FAULTS) + of_styles)
    with pytest.raises(ValueError, match="no row-11; there are: row-10"):
        power.orders([power.FAULTS], ["row-11"], range(1), "cpu")


def test_the_last_record_of_a_key_counts_and_a_cut_line_does_not(tmp_path):
    path = tmp_path / "out.jsonl"
    assert power.read(path) == []
    lines = [record("row-10", 1, "broken"), record("row-10", 1, "wrong"), record("row-10", 2, "right")]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"key": "cut of', encoding="utf-8")
    assert [one["verdict"] for one in power.read(path)] == ["wrong", "right"]


def test_counts():
    found = power.counts([
        record("row-10", 1, "wrong", property="decisions"), record("row-10", 2, "wrong", property="ties"),
        record("row-10", 3, "wrong", property="ties"), record("row-10", 4, "right"), record("row-10", 5, "broken"),
        record("row-10", 1, "right", device="cuda"), record("longflow eager", 1, "not covered", kind=power.RIGHT),
    ])
    row = found["cpu"]["faults"]["row-10"]
    assert row == {
        "seeds": 4, "wrong": 3, "right": 1, "properties": {"ties": 2, "decisions": 1}, "tests": 3, "cases": 25,
        "seconds": 0.5,
    }
    assert found["cuda"]["faults"]["row-10"]["wrong"] == 0
    assert found["cpu"]["right"]["longflow eager"]["seeds"] == 1
    shown = list(power.lines(found))
    assert shown[0].split() == ["cpu", "row-10", "3", "of", "4", "found", "0.5", "s", "ties", "2,", "decisions", "1"]
    assert "0 of 1 right" in shown[1]


def test_stored_counts_of_another_device_stay(tmp_path):
    path = tmp_path / "power.json"
    power.store(power.counts([record("row-10", 1, "wrong")]), {"cpu": "a CPU"}, path)
    power.store(power.counts([record("row-10", 1, "right", device="cuda")]), {"cuda": "a GPU"}, path)
    devices = json.loads(path.read_text(encoding="utf-8"))["devices"]
    assert {name: one["machine"] for name, one in devices.items()} == {"cpu": "a CPU", "cuda": "a GPU"}
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40, "a row is a line"
    assert devices["cpu"]["faults"]["row-10"]["wrong"] == 1 and devices["cuda"]["faults"]["row-10"]["wrong"] == 0


@pytest.mark.parametrize(("verdicts", "code", "made"), [
    ({"row-10": "wrong", "longflow eager": "right"}, 0, 4),
    ({"row-10": "right", "longflow eager": "right"}, 0, 4),  # a fault that is not found is a result
    ({"row-10": "wrong", "longflow eager": "wrong"}, 1, 4),
    ({"row-10": "wrong", "longflow eager": "not covered"}, 1, 4),
    ({"row-10": "broken", "longflow eager": "right"}, 1, 6),
])
def test_a_second_run_makes_only_what_is_missing(verdicts, code, made, tmp_path, monkeypatch, capsys):
    asked = []

    def run(orders, *, device, jobs, done):
        asked.extend(orders)
        for order in orders:
            done({"message": "", **record(*json.loads(order.key)[2:], verdicts[json.loads(order.key)[2]]),
                  "key": order.key})  # fmt: skip

    monkeypatch.setattr(power, "run", run)
    path = tmp_path / "out.jsonl"
    arguments = ["--seeds=1-2", "--only=row-10", "--only=longflow eager", f"--results={path}"]
    assert power.main(arguments) == code
    assert power.main(arguments) == code
    assert len(asked) == made
    assert "longflow eager" in capsys.readouterr().out


@pytest.mark.parametrize(("argument", "said"), [
    ("--seeds=3-2", "--seeds"), ("--only=nothing", "no nothing"), ("--jobs=0", "--jobs"), ("mutants", "KIND"),
])
def test_wrong_arguments_are_refused(argument, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        power.main([argument])
    assert said in capsys.readouterr().err


def test_the_stored_counts_are_those_of_the_present_rows():
    devices = json.loads(power.STORED.read_text(encoding="utf-8"))["devices"]
    assert "cpu" in devices
    for device, kinds in devices.items():
        for kind, names in power.rows().items():
            assert set(kinds.get(kind, names)) == set(names), f"{device}: measure and store the {kind} again"
            for name, one in kinds.get(kind, {}).items():
                assert one["wrong"] + one["right"] <= one["seeds"], name


FORKS = """
import json, os
from kvtwin.conformance.lab.mutation.power import run
from kvtwin.conformance.lab.mutation.verdict_server import Order

IMPL = "kvtwin.conformance.lab.implementations"
planted = {"KVTWIN_PLANTED": "row-10", "KVTWIN_PLANTED_SEED": "1"}
orders = [
    Order("right", "streaming_llm", f"{IMPL}.right.in_numpy", 1, fits=None),
    Order("planted", "longflow", f"{IMPL}.planted", 1, environ=planted),
    Order("again", "longflow", f"{IMPL}.planted", 1, environ=planted),
    Order("another fault", "longflow", f"{IMPL}.planted", 1, environ={**planted, "KVTWIN_PLANTED": "element-10"}),
    Order("lacks a fault", "longflow", f"{IMPL}.planted", 1),
    Order("aborts", "streaming_llm", "aborts", 1, path=os.getcwd()),
]
run(orders, device="cpu", jobs=2, done=lambda record: print("RECORD", json.dumps(record), flush=True))
"""
ABORTS = """
import os, types
from kvtwin.conformance import Capabilities
CAPABILITIES = Capabilities(validates_arguments=False)
streaming_llm = types.SimpleNamespace(keep=lambda *args, **options: os.abort())
"""


@pytest.mark.slow
def test_each_fork_has_its_own_implementation_and_may_die(tmp_path: Path):
    (tmp_path / "aborts.py").write_text(ABORTS, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    records = [line.removeprefix("RECORD ") for line in ran.stdout.splitlines() if line.startswith("RECORD ")]
    found = {one["key"]: one for one in map(json.loads, records)}
    assert len(found) == 6, ran.stdout + ran.stderr
    assert found["right"]["verdict"] == "right" and found["right"]["cases"] > 100, found["right"]
    planted = found["planted"]
    assert planted["verdict"] == "wrong" and planted["property"] and planted["message"], planted
    assert planted["cases"] < 300, "it stops at the first failure"
    said = {key: {"message": one.get("message"), "cases": one["cases"]} for key, one in found.items() if "cases" in one}
    assert said["again"] == said["planted"] != said["another fault"]
    lacks, aborts = found["lacks a fault"], found["aborts"]
    assert lacks["verdict"] == aborts["verdict"] == "broken"
    assert "KVTWIN_PLANTED must be" in lacks["message"] and aborts["message"].startswith("exit code -6")


def test_the_page_has_every_row_with_its_interval():
    page = docs_module("generate", "the page is tested here").power
    assert page.interval(20, 20) == pytest.approx((0.8316, 1), abs=1e-4)
    assert page.interval(0, 20) == pytest.approx((0, 0.1684), abs=1e-4)
    found = power.counts([
        record("row-10", 1, "wrong", property="free_slots"), record("row-10", 2, "right"),
        record("longflow eager", 1, "right", kind=power.RIGHT), record("longflow fused", 1, "wrong", kind=power.RIGHT),
    ])
    text = page.power_page({"cpu": {"machine": "a CPU", "versions": {"torch": "2"}, **found["cpu"]}})
    assert "- on a CPU: a CPU (torch 2)\n- on a GPU: not measured\n" in text
    row = next(line for line in text.splitlines() if line.startswith("| `row-10`"))
    assert "| 1 of 2 (1% to 99%), free slots | not measured |" in row
    stream = next(line for line in text.splitlines() if line.startswith("| `stream`"))
    assert "not measured; out of reach: it has no streams | not measured |" in stream
    assert "2 implementations have 2 verdicts, and 1 of them are false alarms" in text
    for name in [*FAULTS, *right.RIGHT]:
        assert f"| `{name}` |" in text
