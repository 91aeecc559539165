"""Benchmarks of all baselines without a bench file of their own, at the shapes in `blocks`.

They time a decode step and a block of the baseline's state and, if it exports `attend`, that function, over bfloat16
and over FP8 numbers. The gates are in thresholds/NAME.toml.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.fp8_cases import FORMATS

from . import blocks


def cases(shapes: Sequence[blocks.Shape], exports: str = "") -> list[Any]:
    """The baselines that export the name `exports`, each with these shapes. The benchmark's group is the method."""
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


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize(("method", "shape"), cases(blocks.BLOCKS[:1], exports="attend"))
def test_attend_fp8(device_benchmark, method, shape, fp8):
    blocks.time_attend_fp8(device_benchmark, method, shape, fp8, gated=False)


@pytest.mark.parametrize(("method", "shape"), cases(blocks.BLOCKS[:1]))
def test_append_block(device_benchmark, method, shape):
    blocks.time_block(device_benchmark, method, shape, gated=shape in blocks.GATED)
