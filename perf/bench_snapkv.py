"""SnapKV's benchmarks at the shapes of the baselines.

The state scores all tokens with a whole window of queries whenever it compresses: at every step with an interval of 1,
or once in 128 steps as in papers. `test_interval` times all steps of an interval in one graph, including the one that
compresses. Its peers run attention alone as often, over the mean number of slots.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from . import blocks
from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="snapkv")

INTERVAL = 128


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_interval(device_benchmark, shape):
    """One interval: the cache grows from budget + 1 to budget + INTERVAL tokens, and the last step cuts it to the
    budget."""
    state = blocks.full_state("snapkv", shape, interval=INTERVAL)
    assert num_tokens(state) == shape.slots, "the state is not at the start of an interval"
    several = blocks.tokens(shape, INTERVAL, seed=1)
    given = [tuple(tensor[:, :, number].contiguous() for tensor in several) for number in range(INTERVAL)]
    mean = shape._replace(slots=shape.slots + INTERVAL // 2)
    cache = state.key[:, :, :mean.slots], state.value[:, :, :mean.slots]

    def steps() -> tuple[Tensor, ...]:
        return tuple(state.step(*token) for token in given)

    def verify(outputs: tuple[Tensor, ...]) -> None:
        assert not any(bool(output.isnan().any()) for output in outputs), "part of the outputs was not written"
        assert num_tokens(state) == shape.slots, "the state is not at the end of an interval"
        # Check a step that does not compress, and the one that does.
        for number, token in enumerate(given):
            if number in (0, INTERVAL - 1):
                blocks.check_state(state, tuple(tensor[:, :, None] for tensor in token), "snapkv")
                assert num_tokens(state) == shape.slots + (number + 1) % INTERVAL
            else:
                state.step(*token)

    peers = decode_peers(given[0][0], *cache)
    device_benchmark(
        steps, moves=INTERVAL * mean.state_bytes, verify=verify, gated=shape in blocks.GATED,
        peers={name: repeated(peer) for name, peer in peers.items() if name.startswith("cudnn")},
        peers_move=INTERVAL * mean.attention_bytes,
    )


def num_tokens(state) -> int:
    """The number of tokens in the cache, which must be equal in all rows and heads."""
    counts = state.occupied.sum(-1)
    assert int(counts.min()) == int(counts.max())
    return int(counts.max())


def repeated(peer: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        for _ in range(INTERVAL):
            output = peer()
        return output

    return run


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    """A step with an interval of 1. Not gated."""
    blocks.time_step(device_benchmark, "snapkv", shape, gated=False)


@pytest.mark.parametrize("shape", blocks.BLOCKS, ids=str)
def test_attend(device_benchmark, shape):
    blocks.time_attend(device_benchmark, "snapkv", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "snapkv", shape, gated=False)
