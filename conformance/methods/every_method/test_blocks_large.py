"""Methods with a block cache on caches of many slots: several tiles, splits, chunks and blocks of every kernel.

On the CPU, the small tiles of the interpreter need few slots for that. On a GPU the sizes fit its large tiles, once
with few heads and many slots, and once with many heads. Options are those with which a method is measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.lab import compile_only
from kvtwin.reference.blocks import BlockState

BLOCKS = [pair for pair in discovery.methods() if issubclass(pair.state or object, BlockState)]
every_pair = pytest.mark.parametrize("pair", BLOCKS, ids=str)
pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.first]

CPU: dict[str, dict[str, Any]] = {
    # In the interpreter, even and odd budgets take different paths in a step.
    "odd": {"budget": 139, "block_size": 50, "prompt": 240, "steps": 3, "group": 3, "dtype": torch.float32},
    "even": {"budget": 80, "block_size": 70, "prompt": 140, "steps": 3, "group": 2, "dtype": torch.bfloat16},
    "heads": {"budget": 5, "block_size": 3, "prompt": 9, "steps": 2, "batch": 2, "key_value_heads": 3},
}
GPU: dict[str, dict[str, Any]] = {
    "odd": {"budget": 5001, "block_size": 300, "prompt": 8600, "steps": 8, "group": 4, "head_dim": 128,
            "dtype": torch.bfloat16},
    "even": {"budget": 1000, "block_size": 128, "prompt": 1700, "steps": 16, "batch": 2, "key_value_heads": 2,
             "group": 8, "head_dim": 64, "dtype": torch.float16},
    "heads": {"budget": 48, "block_size": 64, "prompt": 90, "steps": 3, "batch": 34, "key_value_heads": 8, "group": 4,
              "head_dim": 128, "dtype": torch.bfloat16},
}


#: Steps fill the cache before they evict, so that tokens of steps compete with each other.
FILLED = {"cpu": {"prompt": 2, "steps": 9}, "cuda": {"prompt": 40, "steps": 16}}
#: Steps in one kernel and in two, most of them where the size would choose the other: (size, in one kernel, options by
#: device). With a multiple of 16 slots, addresses are computed otherwise.
CHOICES: dict[str, tuple[str, bool, dict[str, dict[str, Any]]]] = {
    "odd-fused": ("odd", True, {}),
    "even-apart": ("even", False, {
        "cpu": {"budget": 80, "block_size": 64, "key_value_heads": 2}, "cuda": {"budget": 1008},
    }),
    "heads-fused": ("heads", True, FILLED),
    "heads-apart": ("heads", False, FILLED),
}


@pytest.mark.slow_on_cpu
@every_pair
@pytest.mark.parametrize("size", CPU)
def test_a_large_cache_keeps_step_with_float64(pair, size, twins, device):
    _keep_step(pair, (CPU if device.type == "cpu" else GPU)[size], twins, device)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("pair", [pair for pair in BLOCKS if compile_only.choosing(pair)], ids=str)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_step_in_one_kernel_or_in_two_keeps_step_with_float64(pair, choice, twins, device):
    """The interpreter chooses by the parity of the budget, a GPU by its number of multiprocessors."""
    size, fused, more = CHOICES[choice]
    given = {**(CPU if device.type == "cpu" else GPU)[size], **more.get(device.type, {})}
    # The new token may be evicted at once or after a step, if the method allows that.
    fields = {field.name for field in dataclasses.fields(pair.config)}
    newest = {"recent": int(size == "heads")} if "recent" in fields else {}
    with compile_only.fused_as(pair, fused):
        _keep_step(pair, given, twins, device, newest)


def _keep_step(
    pair: discovery.Pair, given: dict[str, Any], twins: Any, device: torch.device, more: dict[str, Any] | None = None
) -> None:
    given = dict(given)
    budget, block_size = given.pop("budget"), given.pop("block_size")
    own = {**checkers.ask(pair.name, "SMALL", {}), **checkers.measured(pair.name, budget), **(more or {})}
    config = own | {"budget": budget, "block_size": block_size}
    trace = StateTrace(
        method=pair.name, config=tuple(config.items()), seed=6, padding="random", device=str(device), **given
    )
    summary = lockstep.run(trace, checkers.module(twins.optimized, pair))
    assert summary.steps == trace.steps


@every_pair
@pytest.mark.parametrize("size", CPU)
def test_the_sizes_are_beyond_one_tile(pair, size):
    """The purpose of the test above: a prompt beyond the budget, and more slots than a tile has."""
    cpu, gpu = CPU[size], GPU[size]
    for given in (cpu, gpu):
        assert 0.59 * given["prompt"] > given["budget"], "about 0.7 of a padded prompt is valid"
    if size != "heads":
        assert cpu["budget"] + cpu["block_size"] > 64 and gpu["budget"] + gpu["block_size"] > 512
        assert {"odd": 1, "even": 0}[size] == cpu["budget"] % 2
    fields = {field.name for field in dataclasses.fields(StateTrace)}
    assert {*cpu, *gpu} - {"budget", "block_size"} <= fields
