"""The cache shared by KeyDiff and the baselines: tokens arrive in blocks, and after each block the cache evicts.

A block attends causally to the cached tokens and to itself *before* any token is evicted (KeyDiff eq. 6). Then each KV
head of a row evicts down to the budget, in the order that the method defines (KeyDiff A.1). A decode step is a block of
one token. A method may evict less often, for instance once in 128 steps as in LongFlow's comparisons: a KV head then
keeps every token until it has more than `capacity`. At its peak a KV head has capacity + block_size tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ._fp8 import dequantized
from .attention import (
    INF,
    accumulate_dtype,
    causal_logits,
    per_kv_head,
    per_query_head,
    softmax,
    sum_in_order,
    weighted_values,
)
from .contract import Sizes
from .contract.arguments import check_config, resolve_scale
from .contract.attention import check_attention, check_sink_logits, check_slot_mask
from .contract.blocks import BlockConfig as BlockConfig
from .contract.blocks import IntervalConfig as IntervalConfig
from .contract.results import AttendResult as AttendResult
from .contract.scales import FP8, check_scales
from .selection import kept_after, order
from .state import State


class Chunk(NamedTuple):
    """A block of Q new tokens.

    query [B, Hq, Q, D]; valid [B, Q] bool, False for padding; positions [Q] int64; logit and weight [B, Hq, Q, S] in
    accumulate_dtype, over all slots: -inf and 0 for slots that a query does not attend to.
    """

    query: Tensor
    valid: Tensor
    positions: Tensor
    logit: Tensor
    weight: Tensor


def block_logits(
    query: Tensor, key: Tensor, occupied: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Causal logits of the tokens in the last Q slots: [B, Hq, Q, S], -inf for slots that a query does not attend to.

    query [B, Hq, Q, D]; key [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool. The query of an unoccupied slot
    attends to nothing.
    """
    count, slots = query.shape[2], key.shape[2]
    logit = causal_logits(query, key, occupied, scale=scale, softcap=softcap)
    valid = per_kv_head(occupied)[..., slots - count:]                                  # [B, 1 or Hkv, Q]
    valid = per_query_head(valid, query.shape[1]) if valid.shape[1] > 1 else valid
    return logit.masked_fill(~valid[..., None], -INF)


def group_mean(tensor: Tensor, key_value_heads: int) -> Tensor:
    """Mean over the G query heads of each KV head: [B, Hq, ...] -> [B, Hkv, ...]."""
    of_group = tensor.unflatten(1, (key_value_heads, -1))
    return sum_in_order(of_group, 2) / of_group.shape[2]


def check_block(
    query: object, key: object, value: object, occupied: object, key_scale: object, value_scale: object
) -> Sizes:
    """Check the tensors of `attend`, of which query belongs to the last Q of the S slots. Returns the sizes."""
    sizes = check_attention(query, key, value, time="Q", stored=FP8)
    assert isinstance(query, Tensor) and isinstance(key, Tensor)
    if query.shape[2] > sizes.slots:
        raise ValueError(f"query must be [B, Hq, Q, D] with Q <= S = {sizes.slots}, got {tuple(query.shape)}")
    per_head = isinstance(occupied, Tensor) and occupied.dim() == 3
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    check_scales(key_scale, value_scale, key=key, heads=sizes.key_value_heads)
    return sizes


def attention_of_block(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None, key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens in the last Q slots: output [B, Hq, Q, D] in query's dtype, and the weights [B, Hkv, Q,
    S] averaged over the query heads of each KV head. FP8 keys and values are multiplied by their scales first.
    TypeError or ValueError for invalid arguments."""
    sizes = check_block(query, key, value, occupied, key_scale, value_scale)
    scale = resolve_scale(scale, sizes.head_dim)
    dtype = accumulate_dtype(query)
    key, value = dequantized(key, key_scale, dtype), dequantized(value, value_scale, dtype)
    logit = block_logits(query, key, occupied, scale=scale)
    weight = softmax(logit)
    output = weighted_values(weight, value, occupied).to(query.dtype)
    return output, group_mean(weight, sizes.key_value_heads)


class BlockState(State):
    """A cache of S = capacity + block_size slots per KV head: `capacity` slots for cached tokens, then `block_size` for
    the current block.

    key, value [B, Hkv, S, D]; occupied [B, Hkv, S] bool; positions [B, Hkv, S] int64: the position of the token in each
    slot, counted from 0 with padding included, -1 = free; score [B, Hkv, S]: the method's score of each token, -inf in
    free slots. Between calls the tokens of a KV head occupy its first slots without gaps, at most `capacity` of them.

    sink_logits: the logits of attention sinks (gpt-oss), a contiguous tensor [Hq] of a floating type, which is not
    copied. A query's weights are e^s_j / (e^sink + sum_i e^s_i): the sink of its head takes its share and has no value.
    Methods that read weights read these. None: no sinks. TypeError or ValueError for others.

    A subclass sets Config and implements `_observe` (update `score`) and `_rank`.
    """

    Config: ClassVar[type[BlockConfig]]
    _per_slot: ClassVar[tuple[str, ...]] = ("key", "value", "occupied", "positions", "score")

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, sink_logits: Tensor | None = None,
    ) -> None:
        config = check_config(config, self.Config)
        super().__init__(
            config, slots=config.capacity + config.block_size, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        self.sink_logits = check_sink_logits(sink_logits, self.sizes, self.device)
        self.reset()

    def _allocate(self) -> None:
        batch, _, heads, slots, head_dim = self.sizes
        rows = (batch, heads, slots)
        self.key = torch.zeros(*rows, head_dim, dtype=self.dtype, device=self.device)
        self.value = torch.zeros_like(self.key)
        self.occupied = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.positions = torch.full(rows, -1, dtype=torch.int64, device=self.device)
        self.score = torch.full(rows, -INF, dtype=accumulate_dtype(self.key), device=self.device)
        # The slots as the last block saw them, before the eviction. The conformance suite reads this.
        self._before: dict[str, Tensor] = {}

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """`append_block` on an empty state. RuntimeError if the state holds tokens."""
        self._check_prompt(query, key, value, occupied)
        self._check_empty(", or append_block()")
        return self.append_block(query, key, value, occupied)

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Append any number of tokens, in blocks of at most block_size; each block attends, then the cache evicts.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding, which takes no slot. TypeError or ValueError for invalid arguments.
        """
        occupied = self._check_prompt(query, key, value, occupied)
        self._start_change("append_block")
        size = self.config.block_size
        blocks = zip(*(t.split(size, 2) for t in (query, key, value)), occupied.split(size, 1), strict=True)
        output = torch.cat([self._append(*block) for block in blocks], 2)
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a block of one token: query [B, Hq, D]; key, value [B, Hkv, D]. Returns the output [B, Hq, D]."""
        self._check_step(query, key, value)
        self._start_change("step")
        valid = torch.ones(self.sizes.batch, 1, dtype=torch.bool, device=self.device)
        output = self._append(query[:, :, None], key[:, :, None], value[:, :, None], valid)[:, :, 0]
        self._end_change()
        return output

    # Defined by each method ------------------------------------------------------------------------------------------

    def _compared(self, query: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """The queries of a block, in its slots already, and the keys of the slots before `end`, as attention multiplies
        them."""
        return query, self.key[:, :, :end]

    def _observe(self, chunk: Chunk) -> None:
        """Update `score` from the attention of a block. The block is in its slots already, with a score of 0."""

    def _rank(self) -> tuple[Tensor, Tensor]:
        """(rank, protected), both [B, Hkv, S], after `_observe`: the lowest rank is evicted first, protected tokens
        last."""
        raise NotImplementedError

    # One block -------------------------------------------------------------------------------------------------------

    def _append(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
        """Append a block of Q <= block_size tokens; valid [B, Q] bool. Returns [B, Hq, Q, D]."""
        start, count = self.config.capacity, query.shape[2]
        positions = torch.arange(self._seen, self._seen + count, device=self.device)
        block = (..., slice(start, start + count))
        self.key[:, :, start:start + count] = key
        self.value[:, :, start:start + count] = value
        self.occupied[block] = valid[:, None]
        self.positions[block] = positions.where(valid, -1)[:, None]
        self.score[block] = torch.zeros_like(self.score[block]).masked_fill(~valid[:, None], -INF)
        self._seen += count

        end = start + count
        logit = block_logits(
            *self._compared(query, end), self.occupied[..., :end], scale=self.scale, softcap=self.config.softcap
        )
        weight = softmax(logit, self.sink_logits)                                       # [B, Hq, Q, end]
        output = weighted_values(weight, self.value[:, :, :end], self.occupied[..., :end])
        rest = (0, self.config.block_size - count)                                      # slots beyond the block
        self._observe(
            Chunk(query, valid, positions, functional.pad(logit, rest, value=-INF), functional.pad(weight, rest))
        )

        rank, protected = self._rank()
        self._before = {name: getattr(self, name).clone() for name in self._per_slot}
        self._before |= {"query": query, "valid": valid, "rank": rank.clone(), "protected": protected}
        self._compact(self._keep_mask(rank, protected))
        return output.to(query.dtype)

    def _keep_mask(self, rank: Tensor, protected: Tensor) -> Tensor:
        """The slots that keep their tokens, [B, Hkv, S] bool: `budget` of a KV head that evicts, all of any other.

        Unprotected tokens are evicted first, by rank, ties by slot; then protected tokens, the oldest first. The order
        is one integer per slot, so that no rank needs a special value; unoccupied slots are below all tokens.
        """
        slots = self.sizes.slots
        code = order(rank)
        code = torch.where(protected, slots + order(self.positions), code)
        code = torch.where(self.occupied, code, code - 3 * slots)
        kept = kept_after(code, self.config.budget)
        chosen = torch.zeros_like(self.occupied).scatter(-1, kept, True)
        return self.occupied & (chosen | ~self._due())

    def _due(self) -> Tensor:
        """The KV heads that evict after this block, [B, Hkv, 1] bool: those with more than `capacity` tokens."""
        return self.occupied.sum(-1, keepdim=True) > self.config.capacity

    def _compact(self, keep: Tensor) -> None:
        """Evict all but `keep` [B, Hkv, S] and close the gaps.

        If n tokens remain, those in slots n and above move into the free slots below n, the first token into the first
        free slot and so on. No other token moves.
        """
        slot = torch.arange(self.sizes.slots, device=self.device).expand(keep.shape)
        first = slot < keep.sum(-1, keepdim=True)
        free, moves = first & ~keep, keep & ~first                                      # as many of each
        row, head, to = free.nonzero(as_tuple=True)
        source = moves.nonzero()[:, 2]                                                  # in the order of `to`
        for name in self._per_slot:
            tensor = getattr(self, name)
            tensor[row, head, to] = tensor[row, head, source]
        self.occupied.copy_(first)
        self.positions.masked_fill_(~first, -1)
        self.score.masked_fill_(~first, -INF)

    def _adopt(self, positions: Tensor) -> None:
        """Repeat the last eviction so that the tokens at `positions` [B, Hkv, n] (-1: none) remain."""
        for name in self._per_slot:
            getattr(self, name).copy_(self._before[name])
        at = self.positions[..., :, None] == positions[..., None, :]                    # [B, Hkv, S, n]
        self._compact(at.any(-1) & self.occupied)

    def _newest(self, count: int) -> Tensor:
        """The `count` newest tokens of each KV head, [B, Hkv, S] bool."""
        return self.occupied & (order(self.positions) >= self.sizes.slots - count)

    def _oldest(self, count: int) -> Tensor:
        """The `count` oldest tokens of each KV head, [B, Hkv, S] bool."""
        free = (~self.occupied).sum(-1, keepdim=True)
        return self.occupied & (order(self.positions) < free + count)
