"""ThinKV's benchmarks: attention over the quantized paged cache, quantization of new tokens, and eviction.

The peers attend to as many tokens in bfloat16. 60 % of the tokens are reasoning and 30 % execution (4 bits), 10 % are
transition (2 bits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.checkers import thinkv_paging as judge
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.optimized import thinkv
from kvtwin.optimized.thinkv.eviction import segment_representatives
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import Thought

from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="thinkv")

DEVICE = "cuda"
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize
TAU = 128
#: The thought types of ten consecutive windows.
WINDOWS = "RRERRERETR"
LETTERS = {"R": Thought.REASONING, "E": Thought.EXECUTION, "T": Thought.TRANSITION}


class Shape(NamedTuple):
    """B, Hq, Hkv, live tokens, D."""

    batch: int = 256
    query_heads: int = 32
    key_value_heads: int = 8
    tokens: int = 4096
    head_dim: int = 128

    def __str__(self) -> str:
        return f"B{self.batch}-Hq{self.query_heads}-S{self.tokens}"

    @property
    def full_bytes(self) -> int:
        """Bytes of keys and values in bfloat16, queries and output."""
        cache = 2 * self.batch * self.key_value_heads * self.tokens * self.head_dim
        return (cache + 2 * self.batch * self.query_heads * self.head_dim) * ITEM


SHAPE = Shape()


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(40)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)

    return normal


def config_of(shape: Shape) -> ThinKVConfig:
    return ThinKVConfig(budget=shape.tokens, tau=TAU, max_tokens=4 * shape.tokens)


def filled(shape: Shape, draw: Callable[..., Tensor], tokens: int) -> thinkv.PagedCache:
    """A cache after appending `tokens` tokens, window by window. Beyond shape.tokens, each group of new tokens evicts
    as many past ones at random."""
    config = config_of(shape)
    cache = thinkv.PagedCache(
        config, batch=shape.batch, key_value_heads=shape.key_value_heads, head_dim=shape.head_dim, dtype=DTYPE,
        device=DEVICE,
    )
    every = torch.ones(shape.batch, dtype=torch.bool, device=DEVICE)
    number = torch.zeros(shape.batch, dtype=torch.int64, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(41)
    for start in range(0, tokens, config.group):
        window = start // TAU
        if start >= shape.tokens:
            past = (cache.segments >= 0) & (cache.segments < window)
            chance = torch.rand(past.shape, device=DEVICE, generator=generator).masked_fill(~past, 2.0)
            evicted = chance.argsort(1)[:, :config.group]
            cache.evict(torch.zeros_like(past).scatter(1, evicted, True) & past)
        for token in range(start, start + config.group):
            key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
            cache.append(key, value, number + token)
        kind = LETTERS[WINDOWS[window % len(WINDOWS)]]
        cache.flush(every, torch.full_like(number, int(kind)), torch.full_like(number, window))
    assert not bool(cache.overflow.any())
    return cache


def payload(cache: thinkv.PagedCache, shape: Shape) -> int:
    """The minimum bytes of a step: codes and scales of the live tokens, queries and output."""
    elements = 2 * shape.key_value_heads * shape.head_dim * int((cache.groups >= 0).sum())
    return int(cache.bits_per_element() * elements / 8) + 2 * shape.batch * shape.query_heads * shape.head_dim * ITEM


def check_row(
    cache: thinkv.PagedCache, query: Tensor, result: tuple[Tensor, Tensor], row: int, with_sparsity: bool = True
) -> None:
    """Check one row's output and, if it was requested, its sparsity, against float64 over the dequantized cache."""
    assert not bool(result[0].isnan().any()), "part of the output was not written"
    live = cache.occupied[row].nonzero()[:, 0]
    key, value = (tensor[row:row + 1, :, live].double() for tensor in cache.dequantized())
    occupied = torch.ones(1, len(live), dtype=torch.bool, device=DEVICE)
    blocks = (cache.block_thoughts[row:row + 1] >= 0).sum(1)
    allowed = judge.PagedArithmetic(DTYPE, DTYPE, tiles=(blocks + 1).double())
    attention = attend(query[row:row + 1], key, value, occupied)
    wide = judge.widen_logits(attention, query[row:row + 1], key, allowed)
    assert_within(
        result[0][row:row + 1], attention.output[:, :, 0], judge.attention_error(wide, allowed)[:, :, 0], what="output"
    )
    if not with_sparsity:
        assert bool(result[1].isnan().all()), "the sparsity was not requested, but returned"
        return
    (low, high), _ = judge.sparsity_interval(wide, allowed, cache.config)
    share = float(result[1][row])
    assert float(low) <= share <= float(high), f"sparsity {share}, expected from {float(low)} to {float(high)}"


def attention_benchmark(
    device_benchmark, draw, shape: Shape, tokens: int, gated: bool, with_sparsity: bool = False
) -> None:
    """with_sparsity: compute the sparsity of every row, as one step in TAU does."""
    cache = filled(shape, draw, tokens)
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.tokens, shape.head_dim) for _ in range(2))
    occupied = torch.ones(1, shape.tokens, dtype=torch.bool, device=DEVICE)
    sparsity_mask = torch.full((shape.batch,), with_sparsity, device=DEVICE)

    def verify_peer(output: Tensor) -> None:
        case = DecodeCase.of(query[-1:], key[-1:], value[-1:], occupied)
        assert_within(
            output[-1:].flatten(1), case.attention.output[:, :, 0].flatten(1),
            bounds.decode_output(case).flatten(1), what="peer's output",
        )

    device_benchmark(
        lambda: thinkv.decode_attention(query, cache, sparsity_mask=sparsity_mask), moves=payload(cache, shape),
        verify=lambda result: check_row(cache, query, result, shape.batch - 1, with_sparsity),
        peers=decode_peers(query, key, value), peers_move=shape.full_bytes, verify_peer=verify_peer, gated=gated,
    )


def test_fresh(device_benchmark, draw):
    """A cache without evictions: the tokens of a block share their scales."""
    attention_benchmark(device_benchmark, draw, SHAPE, SHAPE.tokens, gated=True)


def test_fresh_with_sparsity(device_benchmark, draw):
    """The same, with the sparsity."""
    attention_benchmark(device_benchmark, draw, SHAPE, SHAPE.tokens, gated=True, with_sparsity=True)


def test_steady_state(device_benchmark, draw):
    """After 8192 more tokens, each of which evicts another: blocks mix segments and scale groups."""
    attention_benchmark(device_benchmark, draw, SHAPE, SHAPE.tokens + 8192, gated=False)


def test_flush(device_benchmark, draw):
    """Quantize 16 tokens of every row into slots, and evict them again. The reference closes gaps by gathering the
    remaining tokens in bfloat16, as R-KV does. Not gated."""
    shape = SHAPE
    cache = filled(shape, draw, shape.tokens)
    tokens = [[draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2)] for _ in range(16)]
    number = torch.zeros(shape.batch, dtype=torch.int64, device=DEVICE)
    every = torch.ones(shape.batch, dtype=torch.bool, device=DEVICE)
    for place, (key, value) in enumerate(tokens):
        cache.append(key, value, number + shape.tokens + place)

    key, value = (draw(shape.batch, shape.key_value_heads, shape.tokens, shape.head_dim) for _ in range(2))
    kept = torch.randperm(shape.tokens, device=DEVICE)[:shape.tokens - 16].sort().values

    def flush() -> Tensor:
        cache._tables.buffered.fill_(16)
        cache.flush(every, number + int(Thought.REASONING), number + 2 * shape.tokens // TAU)
        last = cache.segments == 2 * shape.tokens // TAU
        cache.evict(last)
        return last

    moved = 2 * shape.batch * shape.key_value_heads * 16 * shape.head_dim
    device_benchmark(
        flush, moves=moved * ITEM + moved * 9 // 16, gated=False,
        verify=lambda last: assert_same(last.sum(1), torch.full_like(number, 16), what="tokens flushed"),
        references={"gather": lambda: (key.index_select(2, kept), value.index_select(2, kept))},
    )


def test_representatives(device_benchmark, draw):
    """k-means of one segment per row, from 128 tokens to 64. Not gated."""
    shape = SHAPE
    key = draw(shape.batch, shape.key_value_heads, TAU, shape.head_dim)
    slots = torch.arange(TAU, device=DEVICE).expand(shape.batch, 1, TAU).contiguous()
    keep = torch.full((shape.batch, 1), 64, dtype=torch.int64, device=DEVICE)
    device_benchmark(
        lambda: segment_representatives(key, slots, keep, most=64), moves=key.nbytes, gated=False,
        verify=lambda keep_mask: assert_same(keep_mask.sum(-1), keep, what="tokens kept"),
    )
