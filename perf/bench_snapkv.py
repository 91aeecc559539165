"""SnapKV at the shapes of the baselines. Its state observes anew with a whole window of queries at every step."""

from __future__ import annotations

import pytest

from . import blocks

pytestmark = pytest.mark.benchmark(group="snapkv")


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    blocks.time_step(device_benchmark, "snapkv", shape, gated=False)


@pytest.mark.parametrize("shape", blocks.BLOCKS, ids=str)
def test_attend(device_benchmark, shape):
    blocks.time_attend(device_benchmark, "snapkv", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "snapkv", shape, gated=False)
