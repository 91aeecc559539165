"""The frame of KeyDiff and the attention baselines: tokens come in blocks, and after each block the cache is cut.

A block attends causally to what is held and to itself, *before* anything is evicted (KeyDiff eq. 6); then every KV head
of a row evicts down to the budget, by a rank that each method defines (KeyDiff A.1). Decoding is the same with blocks
of one token. A method may evict less often, as LongFlow's comparisons compress generated text once in 128 steps: then a
head of a row keeps what comes until it holds more than `capacity`. At its peak it holds capacity + block_size tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .attention import (
    INF, accumulate_dtype, causal_logits, logits, per_kv_head, per_query_head, softmax, weighted_values,
)
from .contract import (
    MethodConfig, Sizes, check_attention, check_dtype, check_integer, check_prompt, check_reorder,
    check_slot_mask, check_step, check_tensor, resolve_device, resolve_scale, state_sizes,
)
from .selection import kept_after, victims


class AttendResult(NamedTuple):
    """Attention of a block of queries, and what each key received of it.

    output [B, Hq, Q, D] in query's dtype; received [B, Hkv, S] float32 (float64 for float64), 0 where unoccupied: an
    aggregate of the attention weights, which one the method says.
    """

    output: Tensor
    received: Tensor


@dataclass(frozen=True)
class BlockConfig(MethodConfig):
    """budget: the most tokens that a row keeps per KV head. block_size: the most that come in before an eviction."""

    block_size: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("block_size", self.block_size, minimum=1)

    @property
    def capacity(self) -> int:
        """The most tokens that a row holds per KV head between calls: one that holds more after a block is cut to its
        budget. The budget itself, where every token beyond it evicts one."""
        return self.budget


class Piece(NamedTuple):
    """A block of Q tokens on its way in. query [B, Hq, Q, D]; real [B, Q] bool, False for padding; positions [Q] int64;
    logit and weight [B, Hq, Q, S] in accumulate_dtype, over all slots, -inf and 0 where a query does not see one."""

    query: Tensor
    real: Tensor
    positions: Tensor
    logit: Tensor
    weight: Tensor


def block_logits(query: Tensor, key: Tensor, occupied: Tensor, *, scale: float) -> Tensor:
    """Logits of the queries of the last Q slots, causal among themselves: [B, Hq, Q, S]; -inf for what is not seen.

    query [B, Hq, Q, D]; key [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S]. A query at an unoccupied slot sees nothing.
    """
    count, slots = query.shape[2], key.shape[2]
    if count == 1:  # see `logits`: equal keys get equal logits
        logit = logits(query[:, :, 0], key, occupied, scale=scale)[:, :, None]
    else:
        logit = causal_logits(query, key, occupied, scale=scale)
    real = per_kv_head(occupied)[..., slots - count:]                                   # [B, 1 or Hkv, Q]
    real = per_query_head(real, query.shape[1]) if real.shape[1] > 1 else real
    return logit.masked_fill(~real[..., None], -INF)


def group_mean(tensor: Tensor, key_value_heads: int) -> Tensor:
    """The mean over the G query heads of a KV head: [B, Hq, ...] -> [B, Hkv, ...]."""
    return tensor.unflatten(1, (key_value_heads, -1)).mean(2)


def check_block(query: object, key: object, value: object, occupied: object) -> Sizes:
    """Validates the arguments of an `attend`: the queries of the last Q of the S slots. Returns the sizes."""
    sizes = check_attention(query, key, value, time="Q")
    assert isinstance(query, Tensor) and isinstance(key, Tensor)
    if query.shape[2] > sizes.slots:
        raise ValueError(f"query must be [B, Hq, Q, D] with Q <= S = {sizes.slots}, got {tuple(query.shape)}")
    per_head = isinstance(occupied, Tensor) and occupied.dim() == 3
    check_slot_mask("occupied", occupied, sizes, per_head, key)
    return sizes


def attention_of_block(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None
) -> tuple[Tensor, Tensor]:
    """output [B, Hq, Q, D] in query's dtype, and the weights averaged over each group, [B, Hkv, Q, S]."""
    sizes = check_block(query, key, value, occupied)
    logit = block_logits(query, key, occupied, scale=resolve_scale(scale, sizes.head_dim))
    weight = softmax(logit)
    output = weighted_values(weight, value, occupied).to(query.dtype)
    return output, group_mean(weight, sizes.key_value_heads)


class BlockState:
    """A cache of capacity + block_size slots per KV head: the first `capacity` hold tokens, the others the block at
    hand.

    key, value [B, Hkv, S, D] with S = capacity + block_size, where capacity is the config's: the budget, unless
    evictions are less often; occupied and positions [B, Hkv, S] bool and int64 (the token in each slot, counted from 0
    with padding included; -1 = free); score [B, Hkv, S], what the method carries of each token or ranked it by last,
    -inf in free slots. Between calls tokens sit in the first slots, without gaps, in `capacity` of them at most.

    Subclasses set Config and implement `_observe` (update `score`) and `_rank`.
    """

    Config: ClassVar[type[BlockConfig]]
    config: Any                                 # a Config; subclasses know which
    # What belongs to a slot and moves with its token, and what belongs to a row.
    _per_slot: ClassVar[tuple[str, ...]] = ("key", "value", "occupied", "positions", "score")
    _per_row: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        if not isinstance(config, self.Config):
            raise TypeError(f"config must be a {self.Config.__name__}, got {type(config).__name__}")
        self.config = config
        self.sizes = state_sizes(
            batch=batch, query_heads=query_heads, key_value_heads=key_value_heads,
            slots=config.capacity + config.block_size, head_dim=head_dim,
        )
        self.dtype = check_dtype("dtype", dtype)
        self.device = resolve_device(device)
        self.scale = resolve_scale(config.scale, head_dim)
        self.reset()

    @property
    def tokens_seen(self) -> int:
        """Tokens that came in since the last reset, padding included."""
        return self._seen

    @torch.inference_mode(False)  # else a state that was made in inference mode could not be used outside of it
    def reset(self) -> None:
        """Forget every token."""
        batch, _, heads, slots, head_dim = self.sizes
        rows = (batch, heads, slots)
        self.key = torch.zeros(*rows, head_dim, dtype=self.dtype, device=self.device)
        self.value = torch.zeros_like(self.key)
        self.occupied = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.positions = torch.full(rows, -1, dtype=torch.int64, device=self.device)
        self.score = torch.full(rows, -INF, dtype=accumulate_dtype(self.key), device=self.device)
        self._seen = 0
        # What the last block saw, before anything was evicted; the conformance suite judges by it.
        self._before: dict[str, Tensor] = {}

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """The prompt: `append_block` on an empty state. RuntimeError when the state already holds tokens."""
        check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        if self._seen:
            raise RuntimeError("prefill needs an empty state: call reset() first, or append_block()")
        return self.append_block(query, key, value, occupied)

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Any number of tokens, at most block_size at a time: attention to what is held and among themselves, eviction.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, default all True.
        Returns [B, Hq, T, D]; padding gives zeros and enters no slot.
        """
        total = check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        if occupied is None:
            occupied = torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        size = self.config.block_size
        blocks = zip(*(t.split(size, 2) for t in (query, key, value)), occupied.split(size, 1), strict=True)
        return torch.cat([self._append(*block) for block in blocks], 2)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A block of one token: query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]."""
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        real = torch.ones(self.sizes.batch, 1, dtype=torch.bool, device=self.device)
        return self._append(query[:, :, None], key[:, :, None], value[:, :, None], real)[:, :, 0]

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        for name in (*self._per_slot, *self._per_row):
            tensor = getattr(self, name)
            tensor.copy_(tensor.index_select(0, index))

    # What methods define ---------------------------------------------------------------------------------------------

    def _observe(self, piece: Piece) -> None:
        """Update `score` by what the block's queries attend to; the block is in its slots, with a score of 0."""

    def _rank(self) -> tuple[Tensor, Tensor]:
        """(rank, protected), both [B, Hkv, S]: the lowest rank goes first, protected tokens last. After `_observe`."""
        raise NotImplementedError

    # One block -------------------------------------------------------------------------------------------------------

    def _append(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        """A block of Q <= block_size tokens; real [B, Q] bool. Returns [B, Hq, Q, D]."""
        start, count = self.config.capacity, query.shape[2]
        positions = torch.arange(self._seen, self._seen + count, device=self.device)
        block = (..., slice(start, start + count))
        self.key[:, :, start:start + count] = key
        self.value[:, :, start:start + count] = value
        self.occupied[block] = real[:, None]
        self.positions[block] = positions.where(real, -1)[:, None]
        self.score[block] = torch.zeros_like(self.score[block]).masked_fill(~real[:, None], -INF)
        self._seen += count

        end = start + count
        logit = block_logits(query, self.key[:, :, :end], self.occupied[..., :end], scale=self.scale)
        weight = softmax(logit)                                                         # [B, Hq, Q, end]
        output = weighted_values(weight, self.value[:, :, :end], self.occupied[..., :end])
        rest = self.config.block_size - count                                           # slots beyond the block
        pad = torch.nn.functional.pad
        self._observe(Piece(query, real, positions, pad(logit, (0, rest), value=-INF), pad(weight, (0, rest))))

        rank, protected = self._rank()
        self._before = {name: getattr(self, name).clone() for name in self._per_slot}
        self._before |= {"query": query, "real": real, "rank": rank.clone(), "protected": protected}
        self._settle(self._stays(rank, protected))
        return output.to(query.dtype)

    def _stays(self, rank: Tensor, protected: Tensor) -> Tensor:
        """Which slots keep their tokens, [B, Hkv, S] bool: `budget` of each head that is due, all of the others'.

        There go first the unprotected, the lowest rank first, ties to the lowest slot; then the protected, the oldest
        first. As integers, so that classes need no magic ranks: unoccupied slots lie below all.
        """
        slots = self.sizes.slots
        code = order(rank)
        code = torch.where(protected, slots + order(self.positions), code)
        code = torch.where(self.occupied, code, code - 3 * slots)
        kept = kept_after(code, self.config.budget)
        chosen = torch.zeros_like(self.occupied).scatter(-1, kept, True)
        return self.occupied & (chosen | ~self._due())

    def _due(self) -> Tensor:
        """Which heads evict, the block in its slots: those that hold more than `capacity`. [B, Hkv, 1] bool."""
        return self.occupied.sum(-1, keepdim=True) > self.config.capacity

    def _settle(self, stays: Tensor) -> None:
        """Evict what does not stay: of n tokens that do, those in slots from n on move into the free ones of the first
        n, the j-th to the j-th. Nothing else moves."""
        slot = torch.arange(self.sizes.slots, device=self.device).expand(stays.shape)
        first = slot < stays.sum(-1, keepdim=True)
        free, moves = first & ~stays, stays & ~first                                    # as many of each
        movers = (~moves).to(torch.int8).sort(dim=-1, stable=True).indices              # those that move come first
        source = movers.gather(-1, (free.cumsum(-1) - 1).clamp_min(0)).where(free, slot)
        for name in self._per_slot:
            tensor = getattr(self, name)
            index = source.view(*source.shape, *[1] * (tensor.dim() - 3)).expand(*source.shape, *tensor.shape[3:])
            tensor.copy_(tensor.gather(2, index))
        self.occupied.copy_(first)
        self.positions.masked_fill_(~first, -1)
        self.score.masked_fill_(~first, -INF)

    def _adopt(self, positions: Tensor) -> None:
        """Evict anew what the last block evicted, so that `positions` [B, Hkv, n] stay (-1: none)."""
        for name in self._per_slot:
            getattr(self, name).copy_(self._before[name])
        at = self.positions[..., :, None] == positions[..., None, :]                    # [B, Hkv, S, n]
        self._settle(at.any(-1) & self.occupied)

    def _newest(self, count: int) -> Tensor:
        """The `count` newest tokens of each head, [B, Hkv, S] bool."""
        return self.occupied & (order(self.positions) >= self.sizes.slots - count)

    def _oldest(self, count: int) -> Tensor:
        """The `count` oldest tokens of each head, [B, Hkv, S] bool."""
        free = (~self.occupied).sum(-1, keepdim=True)
        return self.occupied & (order(self.positions) < free + count)


def order(tensor: Tensor) -> Tensor:
    """The place of each element along the last dimension, 0 for the lowest; among equals, the lowest index first."""
    slots = tensor.shape[-1]
    index = torch.arange(slots, device=tensor.device).expand(tensor.shape)
    return torch.empty_like(index).scatter(-1, victims(tensor, slots), index)


def check_positions(positions: object) -> Tensor:
    """positions [..., S] int64; -1 where there is no token."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a torch.Tensor [..., S], got {type(positions).__name__}")
    check_tensor("positions", positions, dims=max(positions.dim(), 1), layout="[..., S]")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must have dtype torch.int64, got {positions.dtype}")
    return positions
