"""SyncKV at the shapes of its specification: decode steps, averaged over whole strides, against full attention.

What is timed is one stride of steps in one graph, an anticipation among them, its selection counted; and the peers as
often. 30 % of the keys and values are resident where k is a fifteenth of all tokens, R-heads included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kvtwin.conformance import bounds
from kvtwin.conformance.cases import DecodeCase
from kvtwin.conformance.compare import assert_within
from kvtwin.optimized import synckv
from kvtwin.reference.synckv.contract import SyncKVConfig
from torch import Tensor

from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="synckv")

DEVICE = "cuda"
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize
STRIDE = 5
SHARE = 15
#: Room for the tokens that warm-up, rounds and verification bring.
SPARE = 2048


class Shape(NamedTuple):
    """B, tokens, Hq, Hkv, D."""

    batch: int
    tokens: int
    query_heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"B{self.batch}-n{self.tokens // 1024}K"

    @property
    def full_bytes(self) -> int:
        """Of one step of full attention: keys, values, queries and outputs."""
        cache = 2 * self.batch * self.key_value_heads * self.tokens * self.head_dim
        return (cache + 2 * self.batch * self.query_heads * self.head_dim) * ITEM

    def step_bytes(self, clusters: int) -> int:
        """Of one step: all tokens of the representatives, and of the others those chosen."""
        seen = clusters * self.tokens + (self.key_value_heads - clusters) * (self.tokens // SHARE)
        return (2 * self.batch * seen + 2 * self.batch * self.query_heads) * self.head_dim * ITEM


GATED = Shape(8, 2**17)
OTHERS = (Shape(1, 2**17), Shape(4, 2**17), Shape(8, 2**14), Shape(8, 2**16))


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(50)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)

    return normal


def filled(shape: Shape, draw: Callable[..., Tensor], stride: int = STRIDE) -> synckv.SyncKVState:
    """A state of random tokens, as if they had been a prompt: the static sets are every so-manieth token."""
    config = SyncKVConfig(shape.tokens // SHARE, stride=stride, max_tokens=shape.tokens + SPARE)
    state = synckv.SyncKVState(
        config, batch=shape.batch, query_heads=shape.query_heads, key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
    )
    for row in range(shape.batch):
        for tensor in (state.key, state.value):
            tensor[row, :, :shape.tokens] = draw(shape.key_value_heads, shape.tokens, shape.head_dim)
    state.occupied[:, :shape.tokens] = True
    count = state.static.shape[-1]
    state.static.copy_(torch.arange(count, device=DEVICE) * (shape.tokens // count))
    state._fixed[..., state.static[0, 0]] = True
    state._chosen[..., :count] = state.static
    state._counters.copy_(torch.tensor([shape.tokens, 0, shape.tokens, shape.tokens]))
    state._counted = shape.tokens
    return state


def verify_step(state: synckv.SyncKVState, query: Tensor, key: Tensor, value: Tensor) -> None:
    """A further step's output of the last row against float64, over the tokens that its heads may see; and its sets:
    the static tokens, and as many as k."""
    chosen, since = state.chosen, int(state._counters[2])
    assert bool((chosen >= 0).all()), "fewer than k tokens are chosen"
    assert bool((chosen.diff(dim=-1) > 0).all()), "a token is chosen twice"
    seen = state.tokens_seen + 1
    output = state.step(query, key, value)
    looks, labels = state.head_clusters.representatives, list(state.head_clusters.labels)
    visible = torch.zeros(1, len(looks), seen, dtype=torch.bool, device=DEVICE)
    visible = visible.scatter(-1, chosen[-1:], True)[:, labels]                            # [1, Hkv, seen]
    visible[..., since:] = True
    visible[:, list(looks)] = True
    case = DecodeCase.of(query[-1:], state.key[-1:, :, :seen], state.value[-1:, :, :seen], visible, per_head=True)
    assert_within(output[-1:], case.attention.output[:, :, 0], bounds.decode_output(case), what="output")


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Full attention as a model of transformers' has it in eager mode: keys and values once for each query head."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    logit = query[:, :, None] @ key.transpose(2, 3) * key.shape[-1] ** -0.5
    return (logit.softmax(-1, dtype=torch.float32).to(query.dtype) @ value)[:, :, 0]


def repeated(function: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(function() for _ in range(STRIDE))


def stride_benchmark(device_benchmark, draw, shape: Shape, gated: bool) -> None:
    state = filled(shape, draw)
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
    keys, values = (tensor[:, :, :shape.tokens] for tensor in (state.key, state.value))
    exact = DecodeCase.of(query[-1:], keys[-1:], values[-1:])

    def verify_peer(outputs: tuple[Tensor, ...]) -> None:
        assert_within(
            outputs[-1][-1:].flatten(1), exact.attention.output[:, :, 0].flatten(1),
            bounds.decode_output(exact).flatten(1), what="peer's output",
        )

    figures = device_benchmark(
        repeated(lambda: state.step(query, key, value)), moves=STRIDE * shape.step_bytes(state.config.clusters),
        verify=lambda _: verify_step(state, query, key, value),
        peers={name: repeated(peer) for name, peer in decode_peers(query, keys, values).items()},
        peers_move=STRIDE * shape.full_bytes, verify_peer=verify_peer,
        references={"eager": repeated(lambda: eager(query, keys, values))}, gated=gated,
    )
    if gated and figures is not None:
        faster = figures.references["eager"] / figures.seconds
        assert faster >= 8, f"{faster:.2f} times as fast as eager attention; the specification asks for 8"


def test_stride(device_benchmark, draw):
    stride_benchmark(device_benchmark, draw, GATED, gated=True)


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_other_strides(device_benchmark, draw, shape):
    """For information."""
    stride_benchmark(device_benchmark, draw, shape, gated=False)


def test_anticipation(device_benchmark, draw):
    """A step that chooses, for information, beside the selection as torch has it: a stride of one."""
    shape = GATED
    state = filled(shape, draw, stride=1)
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
    keys = state.key[:, [0, 4], :shape.tokens]
    scores = (query.unflatten(1, (8, -1))[:, [0, 4]] @ keys.transpose(2, 3)).amax(2).float()
    device_benchmark(
        lambda: state.step(query, key, value), moves=shape.step_bytes(state.config.clusters),
        verify=lambda _: verify_step(state, query, key, value),
        references={"topk": lambda: scores.topk(shape.tokens // SHARE)}, gated=False,
    )
