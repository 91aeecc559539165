"""H2O at the shapes of its specification: sums of weights, over attention alone by the fastest kernels."""

from __future__ import annotations

import pytest

from . import blocks

pytestmark = pytest.mark.benchmark(group="h2o")


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    blocks.time_step(device_benchmark, "h2o", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS, ids=str)
def test_attend(device_benchmark, shape):
    blocks.time_attend(device_benchmark, "h2o", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "h2o", shape, gated=shape in blocks.GATED)
