"""Every baseline that has no bench file of its own, at the shapes of the targets of the baselines.

A baseline's benchmarks are the decode step and the block of its state and, if it exports `attend`, that function. Their
gates are in thresholds/NAME.toml.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance import discovery

from . import blocks


def cases(shapes: Sequence[blocks.Shape], exports: str = "") -> list[Any]:
    """The baselines that export this name, each with these shapes; the benchmark's group is the method."""
    found: list[Any] = []
    for pair in discovery.pairs():
        if not pair.path.startswith("baselines.") or Path(__file__).with_name(f"bench_{pair.name}.py").exists():
            continue
        if not exports or exports in pair.exports:
            marks = pytest.mark.benchmark(group=pair.name)
            found += [pytest.param(pair.name, shape, id=f"{pair.name}-{shape}", marks=marks) for shape in shapes]
    return found


@pytest.mark.parametrize(("method", "shape"), cases(blocks.STEPS))
def test_step(device_benchmark, method, shape):
    blocks.time_step(device_benchmark, method, shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize(("method", "shape"), cases(blocks.BLOCKS, exports="attend"))
def test_attend(device_benchmark, method, shape):
    blocks.time_attend(device_benchmark, method, shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize(("method", "shape"), cases(blocks.BLOCKS[:1]))
def test_append_block(device_benchmark, method, shape):
    blocks.time_block(device_benchmark, method, shape, gated=shape in blocks.GATED)
