"""SnapKV's benchmarks at the shapes of the baselines.

The state scores all tokens with a whole window of queries whenever it compresses: at every step with an interval of 1,
or once in 128 steps as in papers. `test_interval` times all steps of an interval in one graph, including the one that
compresses.
"""

from __future__ import annotations

import pytest

from kvtwin.conformance.cases.fp8_cases import FORMATS

from . import blocks

pytestmark = pytest.mark.benchmark(group="snapkv")

INTERVAL = 128


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_interval(device_benchmark, shape):
    """One interval: the cache grows from budget + 1 to budget + INTERVAL tokens, and the last step cuts it to the
    budget."""
    blocks.time_interval(device_benchmark, "snapkv", shape, INTERVAL, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    """A step with an interval of 1. Not gated."""
    blocks.time_step(device_benchmark, "snapkv", shape, gated=False)


@pytest.mark.parametrize("shape", blocks.BLOCKS, ids=str)
def test_attend(device_benchmark, shape):
    blocks.time_attend(device_benchmark, "snapkv", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_attend_fp8(device_benchmark, shape, fp8):
    blocks.time_attend_fp8(device_benchmark, "snapkv", shape, fp8, gated=False)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "snapkv", shape, gated=False)
