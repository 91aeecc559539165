"""SyncKV's state under test: which tokens each head attends to at each step, and lockstep with clusters of heads:
what only our own sides promise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.suite.synckv.test_synckv import LITTLE, tokens
from kvtwin.reference.contract.synckv.types import HeadClusters, SyncKVConfig

pytestmark = pytest.mark.kind("equivalence")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 128, 256])
def test_of_equal_tokens_the_first_are_chosen(head_dim, dtype, twins, device):
    """For any query, and in any tile: full tiles, a partial one, and those of a row with padding, where the kernel
    checks the mask of every slot. A compiler may order the additions of each kind of tile differently.
    """
    sizes = {"batch": 2, "query_heads": 4, "key_value_heads": 2, "head_dim": head_dim}
    # Logits must be large: subtracting the log of the denominator loses the last bit of small ones.
    config = SyncKVConfig(2, rho=0.0, stride=1, max_tokens=170, scale=1.0)
    state = twins.optimized.synckv.SyncKVState(
        config, HeadClusters((0, 1), (0, 1)), **sizes, dtype=dtype, device=device
    )
    padding = torch.tensor([[0], [3]], device=device)
    first = (padding + torch.arange(2, device=device))[:, None].expand(-1, 2, -1)
    query, key, value = tokens(1, device, 132, dtype=dtype, **sizes)
    key = key[:, :, :1].expand_as(key)
    state.prefill(query, key, value, torch.arange(132, device=device) >= padding)
    for step in range(3 if device.type == "cpu" else 32):
        assert torch.equal(state.chosen, first), f"after {step} steps"
        query, _, value = tokens(2 + step, device, dtype=dtype, **sizes)
        state.step(query, key[:, :, 0], value)


def frames(state: Any, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    yield (state.prefill(*tokens(1, device, 7, **LITTLE)), state.chosen)
    for step in range(3):
        yield (state.step(*tokens(2 + step, device, **LITTLE)), state.chosen, state.positions)


@pytest.mark.parametrize("exclude", [True, False])
def test_captured_steps_give_the_same_bits(exclude, twins, device):
    """A captured step contains the launches of an anticipation. The device decides whether one is due; otherwise they
    do nothing."""
    module = twins.optimized.synckv
    states = [
        module.SyncKVState(
            SyncKVConfig(4, stride=2, clusters=1, max_tokens=14, exclude_static=exclude), **LITTLE,
            dtype=torch.float32, device=device,
        ) for _ in range(2)
    ]
    if not hasattr(states[0], "_expect_replays"):
        return
    states[1]._expect_replays()
    for one, other in zip(*(frames(state, device) for state in states), strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_graph_replays_beyond_max_tokens_store_nothing(twins, device):
    """The host does not count replays of a graph. Beyond max_tokens, nothing is written, and the output stays
    finite."""
    state = twins.optimized.synckv.SyncKVState(
        SyncKVConfig(2, stride=2, clusters=1, max_tokens=3), **LITTLE, dtype=torch.float32, device=device
    )
    for step in range(3):
        state.step(*tokens(step, device, **LITTLE))
    if not hasattr(state, "_counted"):
        return
    before = [tensor.clone() for tensor in (state.key, state.value, state.positions)]
    state._counted = 0
    output = state.step(*tokens(3, device, **LITTLE))
    assert state.tokens_seen == 3
    assert all(torch.equal(one, other) for one, other in
               zip(before, (state.key, state.value, state.positions), strict=True))
    assert bool(output.isfinite().all())
