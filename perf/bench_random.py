"""Random eviction at the shapes of the baselines: attention, and a fixed score per token."""

from __future__ import annotations

import pytest

from . import blocks

pytestmark = pytest.mark.benchmark(group="random")


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    blocks.time_step(device_benchmark, "random", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "random", shape, gated=shape in blocks.GATED)
