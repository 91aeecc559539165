"""The capacity calculator: it counts what states allocate, in integer arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from kvtwin.conformance import capacity
from kvtwin.conformance.capacity import MODELS, Model


def test_sizes_of_the_models():
    llama = MODELS["llama-3.1-8b"]
    assert llama.scalars_per_token == 65_536
    assert llama.bytes_per_token == 128 * 2**10
    assert MODELS["qwen3-8b"].bytes_per_token == 144 * 2**10


@pytest.mark.parametrize(
    ("text", "number"), [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("1.5 gb", 1_500_000_000), ("7B", 7)]
)
def test_memory(text, number):
    assert capacity.memory_of(text) == number


@pytest.mark.parametrize("text", ["80", "GB", "80TB", "-1GB"])
def test_rejects_invalid_memory_size(text):
    with pytest.raises(ValueError, match="memory must be"):
        capacity.memory_of(text)


def test_requests_fit_whole():
    assert capacity.requests(10, 3) == 3
    assert capacity.requests(9, 3) == 3
    assert capacity.requests(8, 3) == 2
    assert capacity.requests(-5, 3) == 0


def test_each_memory_counts_once():
    one = torch.zeros(4)
    assert capacity.bytes_held({"a": one, "b": [one[:2], torch.zeros(3, dtype=torch.int64)], "c": "x"}) == 16 + 24


def test_what_states_hold_is_counted():
    """EpiKV has keys and values in every layer, and one scorer with hidden states, windows and 21 bytes per slot."""
    model = Model(layers=3, query_heads=2, key_value_heads=1, head_dim=16, hidden_size=40, parameters=0)
    one, two = (capacity.measured("epikv", model, budget) for budget in (1024, 2048))
    per_token = (two - one) / 1024
    # occupied, position, score and rank. On a GPU, more programs share more slots, with at least 64 each, and every
    # program has a float32 output, a maximum and a sum for each query head.
    held, parts = model.bytes_per_token + 1 + 8 + 4 + 8, model.layers * model.query_heads * 4 * (model.head_dim + 2)
    assert held <= per_token <= held + parts / 64
    assert one >= model.bytes_per_token * 1024 + 2 * 40 * 2 + 2 * 64 * 4
    assert capacity.measured("longflow", model, 1024) > model.bytes_per_token * 1024


def test_the_table(tmp_path):
    rows = {row.method: row for row in capacity.table(MODELS["fixture"], 10**9, 4096, 256)}
    assert {"full", "epikv", "longflow", "h2o", "streaming_llm", "thinkv"} <= rows.keys()
    full = rows["full"]
    assert full.bytes_per_token == 2 * 8 * 4 * 32 * 2
    assert full.requests == (10**9 - MODELS["fixture"].weights) // (full.bytes_per_token * 4096)
    for name, row in rows.items():
        assert row.requests > full.requests or name == "full", name
        assert row.bytes_per_token >= full.bytes_per_token or name == "thinkv", name


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "-m", "kvtwin.conformance.capacity", "--model", "fixture", "--memory", "1GB"]
    done = subprocess.run(
        [*command, "--budget", "128", "--json"], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert {row["method"] for row in json.loads(done.stdout)} >= {"full", "epikv"}


@pytest.mark.parametrize("arguments", [
    ["--memory", "much"], ["--budget", "0"], ["--budget", "1" * 400], ["--context", "1" * 400], ["--model", "none"],
])
def test_the_command_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        capacity.main(arguments)
    assert "error" in capsys.readouterr().err
