"""StreamingLLM with `inv_freq`: queries and keys are rotated by their places in the cache:
what only our own sides promise.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.bounds import UNIT, UNITS
from kvtwin.conformance.judge.checkers.streaming_llm import rotated
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.suite.streaming_llm.test_streaming_llm_rotation import SIDES
from kvtwin.reference.baselines.streaming_llm import StreamingLLMConfig, StreamingLLMState
from kvtwin.reference.baselines.streaming_llm import rotate as rotate_reference

pytestmark = pytest.mark.kind("equivalence")

TURN = 0.125


class Shown:
    """A state that shows how many places each attended token is behind the query.

    Queries and keys are e_0, rotated in one pair of channels, and values are unit vectors, so that a token's weight is
    in proportion to exp(cos(TURN * distance)).
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device = device
        config = module.StreamingLLMConfig(4, block_size=3, sinks=2, inv_freq=(TURN,), scale=1.0)
        self.state = module.StreamingLLMState(
            config, batch=2, query_heads=2, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
        )

    def tokens(self, count: int) -> list[Tensor]:
        first = self.state.tokens_seen
        unit = torch.zeros(2, 1, count, 16, device=self.device)
        unit[..., 0] = 1
        value = torch.eye(16, device=self.device)[None, None, first:first + count].expand(2, 1, count, 16)
        return [unit.expand(2, 2, count, 16), unit, value]

    def block(self, real: list[list[int]]) -> list[list[dict[int, int]]]:
        """Append a block. By row and query: the distance of each attended token."""
        mask = torch.tensor(real, dtype=torch.bool, device=self.device)
        output = self.state.append_block(*self.tokens(mask.shape[1]), mask)
        return [[distances(weights) for weights in row] for row in output[:, 1].tolist()]

    def step(self) -> list[dict[int, int]]:
        output = self.state.step(*(tensor[:, :, 0] for tensor in self.tokens(1)))
        return [distances(weights) for weights in output[:, 1].tolist()]


def distances(weights: list[float]) -> dict[int, int]:
    """By token. The newest of them is the query's own, at a distance of 0."""
    held = [token for token, weight in enumerate(weights) if weight > 0]
    cosine = {token: 1 + math.log(weights[token] / weights[held[-1]]) for token in held}
    return {token: round(math.acos(min(1.0, max(-1.0, cosine[token]))) / TURN) for token in held}


@SIDES
def test_distances_are_counted_in_the_cache(side, twins, device):
    """Two sinks. When tokens between them and the newest are gone, the distance to the sinks stays the same."""
    shown = Shown(getattr(twins, side).baselines.streaming_llm, device)
    for token in range(5):
        assert shown.step()[0] == {other: token - other for other in range(token + 1)}
    assert shown.step()[0] == {0: 4, 1: 3, 3: 2, 4: 1, 5: 0}
    assert shown.step()[1] == {0: 4, 1: 3, 4: 2, 5: 1, 6: 0}
    shown.state.reset()
    assert shown.step()[0] == {0: 0}


@SIDES
def test_distances_in_blocks_leave_padding_out(side, twins, device):
    """A block is in the cache while it attends. The rows have different padding, also after an eviction."""
    shown = Shown(getattr(twins, side).baselines.streaming_llm, device)
    assert shown.block([[1, 1, 1], [0, 1, 0]])[0] == [{0: 0}, {0: 1, 1: 0}, {0: 2, 1: 1, 2: 0}]
    first, second = shown.block([[1, 0, 1], [1, 1, 1]])
    assert first[0] == {0: 3, 1: 2, 2: 1, 3: 0}
    assert first[2] == {0: 4, 1: 3, 2: 2, 3: 1, 5: 0}
    assert second == [{1: 1, 3: 0}, {1: 2, 3: 1, 4: 0}, {1: 3, 3: 2, 4: 1, 5: 0}]
    first, second = shown.block([[1, 1, 1], [1, 1, 1]])
    assert first[2] == {0: 6, 1: 5, 3: 4, 5: 3, 6: 2, 7: 1, 8: 0}
    assert second[2] == {1: 6, 3: 5, 4: 4, 5: 3, 6: 2, 7: 1, 8: 0}
    shown.state.reorder(torch.tensor([1, 0], device=device))
    assert shown.step() == [{1: 4, 3: 3, 7: 2, 8: 1, 9: 0}, {0: 4, 1: 3, 7: 2, 8: 1, 9: 0}]


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"), [(16, 1, torch.float32), (24, 3, torch.bfloat16), (80, 2, torch.float16)], ids=str
)
def test_all_channels_rotate_in_step_with_float64(head_dim, group, dtype, twins, device):
    """head_dim / 2 frequencies, as a model has them."""
    pairs = head_dim // 2
    both = lockstep.pair(
        "streaming_llm", twins.optimized.baselines.streaming_llm,
        config={"budget": 6, "block_size": 4, "sinks": 2, "inv_freq": tuple(1e4 ** -(d / pairs) for d in range(pairs))},
        batch=2, query_heads=2 * group, key_value_heads=2, head_dim=head_dim, dtype=dtype, device=device,
    )
    generator = torch.Generator().manual_seed(head_dim)

    def tokens(*count: int) -> list[Tensor]:
        heads = (2 * group, 2, 2)
        made = [torch.randn(2, number, *count, head_dim, generator=generator) for number in heads]
        return [tensor.to(device, dtype) for tensor in made]

    mask = torch.ones(2, 10, dtype=torch.bool, device=device)
    mask[1, :3] = False
    both.prefill(*tokens(10), mask)
    for _ in range(3):
        both.step(*tokens())
    both.append_block(*tokens(5))
    both.reset()
    both.step(*tokens())


def test_blocks_of_many_vectors_rotate_in_step_with_float64(twins, device):
    """Queries and keys take three or more blocks of the kernel that rotates them."""
    both = lockstep.pair(
        "streaming_llm", twins.optimized.baselines.streaming_llm,
        config={"budget": 50, "block_size": 40, "sinks": 2, "inv_freq": (1.0, 0.125)}, batch=1, query_heads=2,
        key_value_heads=1, head_dim=16, dtype=torch.float32, device=device,
    )
    generator = torch.Generator().manual_seed(8)
    for count in (40, 40, 37):
        both.append_block(*(torch.randn(1, heads, count, 16, generator=generator).to(device) for heads in (2, 1, 1)))


def test_with_room_for_all_it_is_the_rotation_by_positions():
    """In float64, a state that rotates equals one that gets rotated queries and keys."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, 2, 9, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    inv_freq = tuple(0.5**d for d in range(8))
    sizes = {"batch": 1, "query_heads": 2, "key_value_heads": 2, "head_dim": 16, "dtype": torch.float64}
    place = torch.arange(100, 109).expand(1, 2, 9)
    turned = [rotated(tensor, place, inv_freq, torch.float32).exact for tensor in tensors[:2]]
    one, other = (
        StreamingLLMState(StreamingLLMConfig(20, 4, 2, inv_freq=option), **sizes, device="cpu")
        for option in (inv_freq, None)
    )
    expected = other.prefill(*turned, tensors[2])
    assert_within(
        one.prefill(*tensors), expected, torch.full_like(expected, 2.0**-40), what="output"
    )
    assert torch.equal(one.key[:, :, :9], tensors[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_bound_of_a_rotation_is_sound_and_tight(dtype):
    """Cosines and sines within 2 ulp, places up to 4,000. A place that is off by one is beyond the bound."""
    generator = torch.Generator().manual_seed(2)
    inv_freq = tuple(1e4 ** -(d / 8) for d in range(8))
    vector = torch.randn(1, 1, 4000, 16, generator=generator).to(dtype)
    place = torch.arange(4000).view(1, 1, -1)
    exact, error = rotated(vector.double(), place, inv_freq, dtype)
    computed = rotate_reference(vector.float(), place, inv_freq).to(dtype)
    share = ((computed.double() - exact).abs() / error).max()
    assert 0.01 <= share <= 1
    angle = place[..., None] * torch.tensor(inv_freq)
    turns = [turn + sign * 4 * UNIT for turn, sign in ((angle.cos(), 1), (angle.sin(), -1))]
    one, other = vector.float().chunk(2, -1)
    worst = torch.cat([one * turns[0] - other * turns[1], other * turns[0] + one * turns[1]], -1).to(dtype)
    assert bool(((worst.double() - exact).abs() <= error).all())
    wrong = rotated(vector.double(), place + 1, inv_freq, dtype).exact
    assert float(((wrong - exact).abs() > error)[..., 0].double().mean()) > 1 - 64 * UNITS[dtype]
