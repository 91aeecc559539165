"""PM-KVQ's benchmark: the steps of one window, at the end of which it is quantized, against full attention."""

from __future__ import annotations

import pytest

from kvtwin.conformance.judge.checkers import pm_kvq as judge
from kvtwin.optimized.baselines.pm_kvq import PMKVQState
from kvtwin.reference.baselines.pm_kvq import PMKVQConfig

from .blocks import DEVICE, DTYPE, Shape
from .quantized import time_interval

pytestmark = pytest.mark.benchmark(group="pm_kvq")

WINDOW = 128
SHAPES = (Shape(64, 32, 1, 8192), Shape(1, 32, 1, 8192))


def empty_state(width: int, shape: Shape) -> PMKVQState:
    """A state without sinks, whose codes have `width` bits in the last window of its tokens."""
    config = PMKVQConfig(width + 0.5, WINDOW, sinks=0, max_tokens=shape.slots)
    assert config.width_after(shape.slots) == config.width_after(shape.slots - WINDOW) == width
    return PMKVQState(
        config, batch=shape.batch, query_heads=shape.query_heads, key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [8, 4, 2])
def test_interval(device_benchmark, width, shape):
    state = empty_state(width, shape)
    time_interval(
        device_benchmark, judge, state, shape, WINDOW,
        lambda: bool(state.tokens_quantized.eq(shape.slots).all()) and state.width == width,
    )
