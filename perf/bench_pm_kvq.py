"""PM-KVQ's benchmark: the steps of one window, at the end of which it is quantized, against full attention.

One graph contains 128 steps. The peers run attention as often, over as many tokens in bfloat16. The first steps of each
replay read what later steps of the replay before left in the buffers, which does not change their time; verification
starts from a new prompt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge import reconstructed
from kvtwin.conformance.judge.checkers import pm_kvq as judge
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.judge.oracle import attend
from kvtwin.optimized.baselines.pm_kvq import PMKVQState
from kvtwin.reference.baselines.pm_kvq import PMKVQConfig

from .blocks import DEVICE, DTYPE, ITEM, ROWS_CHECKED, Shape, tokens
from .peers import decode_peers

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


def check_step(state: Any, token: tuple[Tensor, ...]) -> None:
    """Take a step and compare the output of some rows with float64 over the numbers that the codes stand for."""
    rows, seen = min(ROWS_CHECKED, state.sizes.batch), state.tokens_seen
    key, value, key_error, value_error = judge.read_by(state, rows)
    query, new_key, new_value = (tensor[:rows] for tensor in token)
    key[:, :, seen], value[:, :, seen] = new_key.double(), new_value.double()
    occupied = (torch.arange(key.shape[2], device=key.device) <= seen).expand(rows, -1)
    output = state.step(*token)
    assert not bool(output.isnan().any()), "part of the output was not written"
    truth = attend(query, key, value, occupied).output[:, :, 0]
    bound = reconstructed.decode_output(query, key, value, occupied, key_error, value_error, scale=None)
    assert_within(output[:rows], truth, bound, what="output")


def start_from(state: PMKVQState, seen: int) -> None:
    """Set the counters of a state back to `seen` tokens."""
    state._count.fill_(seen)
    state._counters.fill_(seen)
    state._counted = seen


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [8, 4, 2])
def test_interval(device_benchmark, width, shape):
    state, start = empty_state(width, shape), shape.slots - WINDOW
    state.prefill(*tokens(shape, start, seed=0))
    several = tokens(shape, WINDOW, seed=1)
    given = [tuple(tensor[:, :, number].contiguous() for tensor in several) for number in range(WINDOW)]
    mean = shape._replace(slots=start + WINDOW // 2)
    query, (_, key, value) = given[0][0], tokens(shape._replace(query_heads=shape.key_value_heads), mean.slots, seed=2)

    def steps() -> tuple[Tensor, ...]:
        start_from(state, start)
        return tuple(state.step(*token) for token in given)

    def verify(outputs: tuple[Tensor, ...]) -> None:
        assert not any(bool(output.isnan().any()) for output in outputs), "part of the outputs was not written"
        state.reset()
        state.prefill(*tokens(shape, start, seed=0))
        for number, token in enumerate(given):
            if number in (0, WINDOW - 1):
                check_step(state, token)
            else:
                state.step(*token)
        assert state.tokens_quantized.eq(shape.slots).all() and state.width == width

    cache = 2 * shape.batch * (shape.query_heads + shape.key_value_heads) * shape.head_dim * ITEM
    peers = decode_peers(query, key, value)
    device_benchmark(
        steps, moves=WINDOW * (judge.bytes_of(state) + cache), verify=verify, gated=False,
        peers={
            name: lambda peer=peer: [peer() for _ in range(WINDOW)]
            for name, peer in peers.items() if name.startswith("cudnn")
        },
        peers_move=WINDOW * mean.attention_bytes,
    )
