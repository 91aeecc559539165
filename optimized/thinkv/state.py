"""ThinKV's state on the GPU: tokens are buffered, attended to, and quantized by thought type; past segments shrink.

The reference's state describes the order of events. Everything is preallocated and updated in place. Counters are on
the device, so a captured step can be replayed as any step.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...reference.contract.arguments import check_config, check_room
from ...reference.contract.ranks import ProcessGroup, Shared, check_heads, check_process_group, digest
from ...reference.contract.thinkv.config import ThinKVConfig
from ...reference.contract.thinkv.paging import check_thought
from ...reference.contract.thinkv.types import Thought
from .._common import beside, graph
from .._common.launch import SMALL_TILES, on_device_of
from .._common.operation import operation
from .._common.ranks import ranks_of
from .._common.state import State
from . import _paging_ops as ops
from . import _ranks_ops as on_ranks
from ._shrink_kernels import shrink_kernel
from ._state_kernels import begin_kernel, commit_kernel, settle_kernel
from ._tiles import ITERATIONS, MAX_TOKENS, programs, tile
from .eviction import plan_anneal
from .paging import PagedCache, decode_with

__all__ = ["ThinKVConfig", "ThinKVState"]


#: The number of segments from which on a prompt's tables are made beside the attention. With fewer, the launches before
#: the attention cost more time than is saved.
BESIDE = 32


class ThinKVState(State):
    """The ThinKV cache of `batch` sequences in one layer (ThinKV sections 3 and 4). Attributes as in the reference.

    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head; config.tau up to 128. TypeError or
    ValueError for other arguments, and for CPU tensors outside Triton's interpreter. process_group, replicas: see
    `kvtwin.reference.thinkv.ThinKVState`.
    """

    config: ThinKVConfig
    _rows = (
        "cache", "sparsity", "over_budget", "levels", "_thought", "_thoughts", "_segment", "_segment_sizes", "_live",
        "_seen", "_decoded",
    )
    _of_all_rows = (*State._of_all_rows, "_steps")

    def __init__(
        self, config: ThinKVConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, process_group: ProcessGroup | None = None, replicas: int = 1,
    ) -> None:
        super().__init__(
            check_config(config, ThinKVConfig), slots=config.slots, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        if config.tau > MAX_TOKENS:
            raise ValueError(f"tau must be at most {MAX_TOKENS} for the optimized kernels, got {config.tau}")
        check_heads(
            process_group, replicas, key_value_heads, config=config, batch=batch,
            query_heads_per_key_value_head=self.sizes.group, head_dim=head_dim, dtype=dtype,
        )
        self._shared = Shared(process_group)
        self._ranks = ranks_of(process_group, key_value_heads, self.device, replicas)
        self.cache = PagedCache(
            config, batch=batch, key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=self.device
        )
        by_segment = (batch, config.segments)
        self.sparsity = self._buffer(batch, dtype=torch.float32)
        self.over_budget, self._flushing, self._change, self._sparsity_mask = (
            self._buffer(batch, dtype=torch.bool) for _ in range(4)
        )
        self.levels, self._thoughts, self._segment_sizes = (
            self._buffer(*by_segment, dtype=torch.int64) for _ in range(3)
        )
        self._thought, self._segment, self._seen, self._decoded, self._live, self._position = (
            self._buffer(batch, dtype=torch.int64) for _ in range(6)
        )
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self._start_reset()
        self.cache.reset()
        for tensor in (
            self.sparsity, self.over_budget, self.levels, self._segment_sizes, self._seen, self._decoded, self._live,
        ):
            tensor.zero_()
        self._thought.fill_(int(Thought.REASONING))
        self._thoughts.fill_(int(Thought.REASONING))
        self._segment.fill_(-1)
        self._counted = self._steps = 0
        self._end_change()

    @property
    def tokens_seen(self) -> int:
        """Tokens received, padding included. Reads the device, since the host does not see replays of a graph."""
        return int(self._seen[0])

    @property
    def positions(self) -> Tensor:
        return self.cache.positions

    @property
    def occupied(self) -> Tensor:
        return self.cache.occupied

    @property
    def segments(self) -> Tensor:
        return self.cache.segments

    @property
    def key(self) -> Tensor:
        return self.cache.dequantized()[0]

    @property
    def value(self) -> Tensor:
        return self.cache.dequantized()[1]

    @property
    def thought(self) -> Tensor:
        """The `Thought` of the current segment, [B] int64. Assigning checks and copies the values."""
        return self._thought

    @thought.setter
    def thought(self, value: Tensor) -> None:
        self._thought.copy_(check_thought(value, self._thought))

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt in full precision; then its tokens are quantized and evicted by segments.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens; ValueError for more than
        config.max_tokens tokens.
        """
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        total = occupied.shape[1]
        self._check_empty()
        check_room(0, total, self.config.max_tokens)
        if self._ranks is not None:
            check_process_group(self._shared.process_group, tokens=total, occupied=digest(occupied))
        self._start_change("prefill")
        order, count = self._order(occupied, padded)
        if self._ranks is None:
            place = torch.full(order.shape, -1, dtype=torch.int32, device=self.device)
            side = beside.fork(self.device) if total >= BESIDE * self.config.tau else None
            try:
                with graph.on(side):
                    planned = self.cache._plan_prompt(
                        key, order, count, self._segment_sizes, self.levels, self._live, self.over_budget, self._segment
                    )
                # The attention waits for the plan, and behind that for the two small kernels below. Otherwise it might
                # start before `_place_prompt`, and leave no room for it on any multiprocessor.
                graph.join(side)
                with graph.on(side):
                    self.cache._place_prompt(order, count, *planned, place)
                self._thought.fill_(int(Thought.REASONING))
                self._seen.fill_(total)
                output = self._attend_prompt(query, key, value, occupied, padded=padded)
            finally:
                graph.join(side)
            self.cache._store_prompt(key, value, order, place)
        else:
            self._thought.fill_(int(Thought.REASONING))
            output = self._attend_prompt(query, key, value, occupied, padded=padded)
            self._append_segments(key, value, order)
            self._seen.fill_(total)
        self._counted = total
        self._end_change()
        return output

    def _order(self, occupied: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
        """The indices of each row's tokens, then -1 [B, T], and their number [B]."""
        batch, total = occupied.shape
        index = torch.arange(total, device=self.device)
        if not padded:
            return index.expand(batch, -1), torch.full((batch,), total, device=self.device)
        count = occupied.sum(1)
        token = (~occupied).to(torch.uint8).sort(dim=1, stable=True).indices
        return token.where(index < count[:, None], -1).contiguous(), count

    def _append_segments(self, key: Tensor, value: Tensor, order: Tensor) -> None:
        """Append a prompt segment by segment, for several ranks: each needs the keys of the others to choose."""
        index = order.clamp_min(0)[:, None, :, None].expand(-1, self.sizes.key_value_heads, -1, self.sizes.head_dim)
        key, value, tau = key.gather(2, index), value.gather(2, index), self.config.tau
        self._change.zero_()
        for start in range(0, order.shape[1], tau):
            end = start + tau
            self._append_segment(key[:, :, start:end], value[:, :, start:end], order[:, start:end], end)

    def _append_segment(self, key: Tensor, value: Tensor, positions: Tensor, end: int) -> None:
        """Quantize the N <= tau tokens of a segment of the prompt, and evict from those before. key, value
        [B, Hkv, N, D]; positions [B, N], -1 behind a row's last token; end: the tokens so far."""
        self._segment.add_((positions[:, 0] >= 0).long())
        group = self.config.group
        for tokens in zip(key.split(group, 2), value.split(group, 2), positions.split(group, 1), strict=True):
            self.cache._append_tokens(*tokens)
            self._count()
            self.cache.flush(self.cache.buffered > 0, self._thought, self._segment)
        self._evict(self.config.peak if end > self.config.budget else 0)

    def _count(self) -> None:
        """Count the buffer's tokens as tokens of the current segment."""
        waiting = self.cache.buffered
        self._segment_sizes.scatter_add_(1, self._segment[:, None].clamp_min(0), waiting[:, None])
        self._live.add_(waiting)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Buffer a token, attend to it and to all live tokens, then quantize and evict if due.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not synchronize with the
        host. ValueError beyond config.max_tokens tokens, counted by the host; in replays of a graph, further tokens are
        rejected (see cache.overflow).
        """
        self._check_step(query, key, value)
        check_room(self._counted, 1, self.config.max_tokens)
        self._start_change("step")
        config = self.config
        _begin(
            self._segment, self._seen, self._decoded, self._position, self._sparsity_mask, self.cache.overflow,
            config.tau, config.max_tokens,
        )
        self.cache._append_tokens(key[:, :, None], value[:, :, None], self._position[:, None])
        begins = self._captured or self._steps % config.tau == 0
        output, sparsity = decode_with(
            self._ranks if begins else None, query, self.cache, self.scale, self._sparsity_mask
        )
        low, high = config.edges or (0.0, 0.0)
        _settle(
            self.sparsity, sparsity, self._thought, self._thoughts, self._segment, self._seen, self._decoded,
            self._position, self._sparsity_mask, self.cache.buffered, self._segment_sizes, self._live, self._flushing,
            self._change, config.tau, config.group, low, high, config.edges is not None,
        )
        self.cache._flush(self._flushing, self._thought, self._segment)
        self._counted, self._steps = self._counted + 1, self._steps + 1
        self._evict(self._shared_rows())
        self._end_change()
        return output

    def _shared_rows(self) -> int:
        """The most tokens that the segments have which may shrink after this step; 0 without several ranks. Where no
        thought ends, a step brings a row one token over the budget, and one segment makes room for it."""
        config = self.config
        if self._captured or self._steps % config.tau == 0:
            return config.peak
        return min(config.tau, config.peak) if self._counted > config.budget else 0

    def _evict(self, rows: int) -> None:
        """Shrink every segment before the current one to the size that definition 3 gives it. rows: the most tokens
        that these segments have."""
        config, cache = self.config, self.cache
        plan = plan_anneal(
            self._segment_sizes, self.levels, self._thoughts, self._segment, self._change, self._live, config.budget,
            config.retention,
        )
        storage, tables = cache._storage, cache._tables
        keys = (
            tables.block_thoughts, tables.segments, tables.positions, tables.slot_groups, tables.physical, storage.pool,
            storage.key_scales, storage.chunk_scales, cache._formats, config.block, config.group, config.tau,
            self.sizes.head_dim, min(config.retention[0], config.tau),
        )
        if self._ranks is None:
            cache._evict(_shrink(self._segment_sizes, plan.size, *keys))
        elif rows:
            tokens = self._segment_sizes.where(plan.size < self._segment_sizes, 0)
            first = tokens.cumsum(1) - tokens
            grams = on_ranks.grams(self._segment_sizes, plan.size, first, *keys, rows)
            cache._evict(on_ranks.shrink(
                self._ranks.each(grams), self._segment_sizes, plan.size, first, tables.segments, tables.positions,
                tables.physical, config.block, *keys[-2:], self._ranks.replicas,
            ))
        _commit(self._segment_sizes, self.levels, self._live, self.over_budget, *plan)


# Operations ----------------------------------------------------------------------------------------------------------


@operation("kvtwin::thinkv_begin", mutates_args=("segment", "positions", "sparsity_mask", "overflow"))
def _begin(
    segment: Tensor, seen: Tensor, decoded: Tensor, positions: Tensor, sparsity_mask: Tensor, overflow: Tensor,
    tau: int, most: int,
) -> None:
    with on_device_of(segment):
        begin_kernel[(len(segment),)](
            segment, seen, decoded, positions, sparsity_mask, overflow, tau, most, num_warps=1
        )


@operation(
    "kvtwin::thinkv_settle",
    mutates_args=("sparsity", "thought", "thoughts", "seen", "decoded", "sizes", "live", "flush", "change"),
)
def _settle(
    sparsity: Tensor, found: Tensor, thought: Tensor, thoughts: Tensor, segment: Tensor, seen: Tensor, decoded: Tensor,
    positions: Tensor, sparsity_mask: Tensor, buffered: Tensor, sizes: Tensor, live: Tensor, flush: Tensor,
    change: Tensor, tau: int, group: int, low: float, high: float, by_sparsity: bool,
) -> None:
    with on_device_of(segment):
        settle_kernel[(len(segment),)](
            sparsity, found, thought, thoughts, segment, seen, decoded, positions, sparsity_mask, buffered, sizes, live,
            flush, change, tau, group, sizes.shape[1], low, high, CLASSIFY=by_sparsity, num_warps=1,
        )


@operation("kvtwin::thinkv_commit", mutates_args=("sizes", "levels", "live", "over_budget"))
def _commit(
    sizes: Tensor, levels: Tensor, live: Tensor, over_budget: Tensor, new_sizes: Tensor, new_levels: Tensor,
    new_over_budget: Tensor,
) -> None:
    with on_device_of(sizes):
        commit_kernel[(len(sizes),)](
            sizes, levels, live, over_budget, new_sizes, new_levels, new_over_budget, sizes.shape[1],
            SEGMENTS=4 if SMALL_TILES else 1024, num_warps=4,
        )


@operation("kvtwin::thinkv_shrink", mutates_args=())
def _shrink(
    sizes: Tensor, planned: Tensor, block_thoughts: Tensor, segments: Tensor, positions: Tensor, slot_groups: Tensor,
    physical: Tensor, pool: Tensor, key_scales: Tensor, chunk_scales: Tensor, formats: str, block: int, group: int,
    tau: int, head_dim: int, most: int,
) -> Tensor:
    """The slots to evict, [B, S] bool. `most`: the largest number of tokens that a shrinking segment keeps."""
    (batch, number), (slots, entries) = sizes.shape, (positions.shape[1], physical.shape[1])
    groups, heads = key_scales.shape[1:3]
    gone = torch.zeros(positions.shape, dtype=torch.bool, device=positions.device)
    row_programs = programs(batch, number, positions.device)
    scratch = torch.empty(batch, row_programs, tau, dtype=torch.int64, device=positions.device)
    layout = ops.layout(formats, block, group, heads, head_dim, entries)
    with on_device_of(positions):
        shrink_kernel[(batch, row_programs)](
            gone, sizes, planned, block_thoughts, segments, positions, slot_groups, physical, pool,
            key_scales.view(torch.uint8), chunk_scales,
            scratch, heads, slots, entries, groups, number, tau, layout.row_words, *layout.base,
            **layout.constants, GROUP=group, BLOCK=block, HEAD_DIM=head_dim,
            ITERATIONS=ITERATIONS, SLOTS=8 if SMALL_TILES else min(1024, max(16, triton.next_power_of_2(slots))),
            **tile(tau, most, head_dim), num_stages=1,
        )
    return gone


@_shrink.register_fake
def _(positions: Tensor) -> Tensor:
    return positions.new_empty(positions.shape, dtype=torch.bool)
