"""VATP at the shapes of its specification: H2O's sums times the sizes of the values."""

from __future__ import annotations

import pytest

from . import blocks

pytestmark = pytest.mark.benchmark(group="vatp")


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    blocks.time_step(device_benchmark, "vatp", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS, ids=str)
def test_attend(device_benchmark, shape):
    blocks.time_attend(device_benchmark, "vatp", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "vatp", shape, gated=shape in blocks.GATED)
