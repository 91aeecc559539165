"""KIVI's benchmark: the steps of one residual, at the end of which keys are quantized, against full attention."""

from __future__ import annotations

import pytest

from kvtwin.conformance.judge.checkers import kivi as judge
from kvtwin.optimized.baselines.kivi import KIVIState
from kvtwin.reference.baselines.kivi import KIVIConfig

from .blocks import DEVICE, DTYPE, Shape
from .quantized import time_interval

pytestmark = pytest.mark.benchmark(group="kivi")

RESIDUAL = 128
SHAPES = (Shape(64, 32, 1, 8192), Shape(1, 32, 1, 8192))


def empty_state(bits: int, shape: Shape) -> KIVIState:
    config = KIVIConfig(bits, bits, group=32, residual=RESIDUAL, max_tokens=shape.slots)
    return KIVIState(
        config, batch=shape.batch, query_heads=shape.query_heads, key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4])
def test_interval(device_benchmark, bits, shape):
    state = empty_state(bits, shape)
    time_interval(
        device_benchmark, judge, state, shape, RESIDUAL, lambda: bool(state.keys_quantized.eq(shape.slots).all()),
        gated=shape == SHAPES[0],
    )
