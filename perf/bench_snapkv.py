"""SnapKV at the shapes of the baselines. Its state observes anew with a whole window of queries whenever it compresses:
with an interval of 1 at every step, as papers have it once in 128.

What is timed of an interval are all of its steps, in one graph, the one that compresses among them; and attention alone
as often, over as many slots as the cache holds in the mean.
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
    """From budget + 1 to budget + INTERVAL tokens, of which the last one's step leaves the budget."""
    state = blocks.full_state("snapkv", shape, interval=INTERVAL)
    assert held(state) == shape.slots, "it does not begin with an interval"
    several = blocks.tokens(shape, INTERVAL, seed=1)
    given = [tuple(tensor[:, :, number].contiguous() for tensor in several) for number in range(INTERVAL)]
    mean = shape._replace(slots=shape.slots + INTERVAL // 2)
    cache = state.key[:, :, :mean.slots], state.value[:, :, :mean.slots]

    def steps() -> tuple[Tensor, ...]:
        return tuple(state.step(*token) for token in given)

    def verify(outputs: tuple[Tensor, ...]) -> None:
        assert not any(bool(output.isnan().any()) for output in outputs), "part of the outputs was not written"
        assert held(state) == shape.slots, "it does not end with an interval"
        # A step that compresses nothing, and the one that does.
        for number, token in enumerate(given):
            if number in (0, INTERVAL - 1):
                blocks.check_state(state, tuple(tensor[:, :, None] for tensor in token), "snapkv")
                assert held(state) == shape.slots + (number + 1) % INTERVAL
            else:
                state.step(*token)

    peers = decode_peers(given[0][0], *cache)
    device_benchmark(
        steps, moves=INTERVAL * mean.state_bytes, verify=verify, gated=shape in blocks.GATED,
        peers={name: as_often(peer) for name, peer in peers.items() if name.startswith("cudnn")},
        peers_move=INTERVAL * mean.attention_bytes,
    )


def held(state) -> int:
    """Tokens that all rows and heads hold."""
    counts = state.occupied.sum(-1)
    assert int(counts.min()) == int(counts.max())
    return int(counts.max())


def as_often(peer: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        for _ in range(INTERVAL):
            output = peer()
        return output

    return run


@pytest.mark.parametrize("shape", blocks.STEPS, ids=str)
def test_step(device_benchmark, shape):
    """With an interval of 1, for information."""
    blocks.time_step(device_benchmark, "snapkv", shape, gated=False)


@pytest.mark.parametrize("shape", blocks.BLOCKS, ids=str)
def test_attend(device_benchmark, shape):
    blocks.time_attend(device_benchmark, "snapkv", shape, gated=shape in blocks.GATED)


@pytest.mark.parametrize("shape", blocks.BLOCKS[:1], ids=str)
def test_append_block(device_benchmark, shape):
    blocks.time_block(device_benchmark, "snapkv", shape, gated=False)
