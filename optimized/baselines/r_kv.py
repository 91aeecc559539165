"""R-KV on the GPU: heads that are due score their tokens in four launches, without an [S, S] matrix in memory; see
`redundancy_kernels.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.baselines.r_kv import RKVConfig
from .._common.block_cache.observe import observe
from .._common.block_cache.redundancy_kernels import importance_kernel, mix_kernel, prepare_kernel, similarity_kernel
from .._common.block_cache.state import Block, BlockState
from .._common.launch import SMALL_TILES, cdiv, on_device_of, padded_head_dim
from .._common.numerics import LOG2_E
from .._common.operation import operation

__all__ = ["RKVConfig", "RKVState"]

#: Keys per tile, and warps; for the products of all keys, the keys of a program and its warps. The interpreter and
#: float32 need small tiles: see `kernels.FLOAT32_TILE`.
TILE, WARPS, ROWS, WARPS_OF_ALL = 64, 4, 128, 8
#: Slots that a program reads at a time, tiles that are merged at a time, and window queries per `tl.dot`.
CHUNK, MERGED, QUERIES = (16, 2, 16) if SMALL_TILES else (1024, 64, 16)


class Scratch(NamedTuple):
    """Buffers between the launches, [B * Hkv, S]: factors, inverses, means, importance float32, age, by_age int32, and
    left_out int64. parts float32 [2, B * Hkv, W, S / 16]: maxima and sums of the window's softmaxes over each tile.
    """

    factors: Tensor
    inverses: Tensor
    means: Tensor
    importance: Tensor
    age: Tensor
    by_age: Tensor
    left_out: Tensor
    parts: Tensor


class RKVState(BlockState):
    """An R-KV cache. After a block or decode step, a KV head of a row with at least budget + interval tokens is due: it
    scores its tokens and evicts down to the budget. `score` is the score at the last time, +inf for tokens that were in
    the window then or came later. The device decides which heads are due, from its own token counts. A step without
    evictions costs attention and five launches whose programs return at once.
    """

    Config = RKVConfig
    _rows = (*BlockState._rows, "_window_query", "_window_positions")
    _rule = "append"
    _library_attends = True
    _chooses_early = True

    def _allocate(self) -> None:
        batch, query_heads, heads, slots, head_dim = self.sizes
        observers = self.config.observers
        # A ring: the query of position p is at index p % observers.
        self._window_query = self._buffer(batch, query_heads, observers, head_dim, dtype=self.dtype)
        self._window_positions = self._buffer(batch, observers, dtype=torch.int64)
        self._window = self._window_query, self._window_positions
        self._numbers = self._buffer(4, batch * heads, slots, dtype=torch.int32)
        of_slots = [torch.float32] * 4 + [torch.int32] * 2 + [torch.int64]
        parts = self._buffer(2, batch * heads, observers, cdiv(slots, 16), dtype=torch.float32)
        self._between = Scratch._make([*(self._buffer(batch * heads, slots, dtype=dtype) for dtype in of_slots), parts])

    def _clear(self) -> None:
        self._window_positions.fill_(-1)

    def _evict(self, block: Block, count: int) -> None:
        self._choose(block, count)
        self._settle(None, count)

    def _finish_step(self, query: Tensor) -> None:
        self._score_due(1, appended=True)
        self._thin(self._score, 1, appended=True)

    def _prepare(self, block: Block) -> Block:
        return block

    def _choose(self, prepared: Block, count: int) -> None:
        """Score the tokens. `_thin` evicts by the scores, when it moves tokens."""
        observe(prepared.query, prepared.valid, self._seen, self._window_query, self._window_positions)
        self._score_due(count, appended=False)

    def _settle(self, chosen: None, count: int) -> None:
        self._thin(self._score, count, appended=False)

    def _score_due(self, count: int, *, appended: bool) -> None:
        config = self.config
        score_due(
            self._window_query, self._window_positions, self.key, self.occupied, self._token_index, self._valid_seen,
            self._counts, self._score, *self._between, self.scale, config.capacity, count, config.kernel_size,
            config.mix_lambda, config.threshold, config.exempts_first, config.order == "score", appended,
        )


@operation(
    "kvtwin::r_kv_score",
    mutates_args=("score", "factors", "inverses", "means", "importance", "age", "by_age", "left_out", "parts"),
)
def score_due(
    window_query: Tensor, window_positions: Tensor, key: Tensor, occupied: Tensor, token_index: Tensor,
    valid_seen: Tensor, counts: Tensor, score: Tensor, factors: Tensor, inverses: Tensor, means: Tensor,
    importance: Tensor, age: Tensor, by_age: Tensor, left_out: Tensor, parts: Tensor, scale: float, capacity: int,
    count: int, kernel_size: int, mix_lambda: float, threshold: float, exempts_first: bool, by_score: bool,
    appended: bool,
) -> None:
    """Store the scores of heads with more than `capacity` tokens, after `count` tokens arrived. The tokens that arrived
    in other heads, unless `appended`, get +inf. by_score: the tokens are in the order of the scores of the last time.

    window_query [B, Hq, W, D] and window_positions [B, W] int64: the queries of the last tokens, -1 for padding. A
    state's buffers as in `ops.arrive`; valid_seen and counts include the new tokens; the others: a Scratch.
    """
    batch, heads, slots, head_dim = key.shape
    window, end = window_positions.shape[1], capacity + count
    small = SMALL_TILES or key.dtype == torch.float32
    tile = 16 if small else TILE // 2 if head_dim > 128 else TILE
    tiles, batch_heads = cdiv(end, tile), batch * heads
    shape = {"HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim), "TILE": tile}
    rows = tile if small else ROWS
    of_window = window_query, window_positions, key, occupied, token_index, valid_seen, counts
    sizes = capacity, end, slots, heads, window, parts.shape[3]
    options = {"GROUP": window_query.shape[1] // heads, "QUERIES": QUERIES, "num_warps": WARPS, **shape}
    with on_device_of(key):
        prepare_kernel[(batch_heads * tiles,)](
            *of_window, factors, inverses, age, by_age, left_out, parts, score if by_score else None,
            scale * LOG2_E.value, *sizes, **options, BY_SCORE=by_score,
        )
        similarity_kernel[(batch_heads * cdiv(end, rows),)](
            key, occupied, counts, factors, inverses, age, by_age, means, left_out, threshold, capacity, end, slots,
            ROWS=rows, EXEMPTS_FIRST=exempts_first, CHUNK=CHUNK, num_warps=4 if small else WARPS_OF_ALL, **shape,
        )
        importance_kernel[(batch_heads * tiles,)](
            *of_window, age, left_out, parts, means, importance, scale * LOG2_E.value, *sizes, MERGED=MERGED,
            **options,
        )
        mix_kernel[(batch_heads,)](
            window_positions, occupied, token_index, valid_seen, counts, means, importance, age, score, mix_lambda,
            1.0 - mix_lambda, capacity, end, slots, heads, window, kernel_size, APPENDED=appended, CHUNK=CHUNK,
            num_warps=4,
        )
