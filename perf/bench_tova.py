"""TOVA at the shapes of its specification: the newest query's weights, over attention alone by the fastest kernels."""

from __future__ import annotations

import pytest

from . import blocks

pytestmark = pytest.mark.benchmark(group="tova")


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    blocks.time_step(device_benchmark, "tova", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS, ids=str)
def test_attend(device_benchmark, shape):
    blocks.time_attend(device_benchmark, "tova", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "tova", shape, gated=shape in blocks.GATED)
