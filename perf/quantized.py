"""Shared benchmarks of methods that quantize all tokens: the steps of one window, at the end of which it is quantized.

One graph contains all steps of the window. The peers run attention as often, over as many tokens in bfloat16. The first
steps of each replay read what later steps of the replay before left in the buffers, which does not change their time;
verification starts from a new prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from kvtwin.conformance.suite.quantized_states import checked_step

from .blocks import ITEM, ROWS_CHECKED, Shape, tokens
from .harness import DeviceBenchmark
from .peers import decode_peers


def check_step(judge: ModuleType, state: Any, token: tuple[Tensor, ...]) -> None:
    """Take a step and compare the output of some rows with float64. judge: the method's checker."""
    output = checked_step(judge, state, token, min(ROWS_CHECKED, state.sizes.batch))
    assert not bool(output.isnan().any()), "part of the output was not written"


def start_from(state: Any, tokens_seen: int) -> None:
    """Set the counters of a state to so many tokens."""
    state._count.fill_(tokens_seen)
    state._counters.fill_(tokens_seen)
    state._counted = tokens_seen


def time_interval(
    device_benchmark: DeviceBenchmark, judge: ModuleType, state: Any, shape: Shape, window: int,
    is_quantized: Callable[[], bool], gated: bool = False,
) -> None:
    """Time the last `window` steps of a state with room for shape.slots tokens. is_quantized: whether all of them are,
    after these steps. gated: whether the benchmark has thresholds."""
    start = shape.slots - window
    state.prefill(*tokens(shape, start, seed=0))
    several = tokens(shape, window, seed=1)
    given = [tuple(tensor[:, :, number].contiguous() for tensor in several) for number in range(window)]
    mean = shape._replace(slots=start + window // 2)
    query, (_, key, value) = given[0][0], tokens(shape._replace(query_heads=shape.key_value_heads), mean.slots, seed=2)

    def steps() -> tuple[Tensor, ...]:
        start_from(state, start)
        return tuple(state.step(*token) for token in given)

    def verify(outputs: tuple[Tensor, ...]) -> None:
        assert not any(bool(output.isnan().any()) for output in outputs), "part of the outputs was not written"
        state.reset()
        state.prefill(*tokens(shape, start, seed=0))
        for number, token in enumerate(given):
            if number in (0, window - 1):
                check_step(judge, state, token)
            else:
                state.step(*token)
        assert is_quantized(), "some tokens are not quantized, or not as they should be"

    cache = 2 * shape.batch * (shape.query_heads + shape.key_value_heads) * shape.head_dim * ITEM
    peers = decode_peers(query, key, value)
    device_benchmark(
        steps, moves=window * (judge.bytes_of(state) + cache), verify=verify, gated=gated,
        peers={
            name: lambda peer=peer: [peer() for _ in range(window)]
            for name, peer in peers.items() if name.startswith("cudnn")
        },
        peers_move=window * mean.attention_bytes,
    )
