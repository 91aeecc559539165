"""R-KV on the GPU: heads that are due score their tokens in four launches, without an [S, S] matrix in memory; see
`redundancy_kernels.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.baselines.r_kv import RKVConfig
from .._common.block_cache.observe import observe
from .._common.block_cache.redundancy_kernels import importance_kernel, mix_kernel, prepare_kernel
from .._common.block_cache.similarity_kernels import latest_kernel
from .._common.block_cache.state import Block, BlockState
from .._common.launch import (
    INTERPRETED,
    SMALL_TILES,
    cdiv,
    multiprocessors,
    on_device_of,
    padded_head_dim,
    padded_slots,
)
from .._common.numerics import logit_factors
from .._common.operation import operation

__all__ = ["RKVConfig", "RKVState"]


class Products(NamedTuple):
    """How `latest_kernel` divides its work: tokens of a program and of a tile, at most ROW_UNIT, warps, stages, and the
    most registers of a thread, None for any; tiles between two looks at what is found; programs that share a head's
    tokens, as many as give `programs` per multiprocessor, and at most `splits`."""

    rows: int
    tile: int
    warps: int
    stages: int
    registers: int | None = None
    round: int = 8
    programs: int = 1
    splits: int = 1


#: For many heads, and for few: less than MANY programs per multiprocessor. The best of 80 on an H200; `round` suits
#: both keys that resemble each other and keys that do not.
PRODUCTS, PRODUCTS_OF_FEW, MANY = Products(128, 64, 8, 5, 128, 16), Products(64, 64, 4, 3, 168, 16, 16, 4), 4
#: float32 and the interpreter need small tiles: see `kernels.FLOAT32_TILE`.
SMALL_PRODUCTS = Products(16, 16, 4, 3, round=2)
#: Keys per tile of the other kernels, their warps, and those of `mix_kernel`.
TILE, WARPS, MIXING_WARPS = 64, 4, 16
#: Slots that a program reads at a time, and tokens whose ages are compared at a time; tiles that are merged at a time,
#: and window queries per `tl.dot`.
CHUNK, OTHERS, MERGED, QUERIES = (16, 16, 2, 16) if SMALL_TILES else (4096, 512, 64, 16)


class Scratch(NamedTuple):
    """Buffers between the launches. age int32 [B * Hkv, S]. By age, [B * Hkv, width]: factors, inverses, means and
    importance float32, by_age int32, left_out int64, and latest int32 [N, B * Hkv, width], of each of N programs that
    share a head's tokens. sums int64 [B * Hkv, D], zeros between evictions. parts float32 [2, B * Hkv, W, S / 16]:
    maxima and sums of the window's softmaxes over each tile.
    """

    age: Tensor
    by_age: Tensor
    factors: Tensor
    inverses: Tensor
    left_out: Tensor
    latest: Tensor
    means: Tensor
    importance: Tensor
    sums: Tensor
    parts: Tensor


def products_of(key: Tensor) -> tuple[Products, int]:
    """How the keys [B, Hkv, S, D] of a state are multiplied, and by how many programs that share a head's tokens."""
    batch, heads, slots, head_dim = key.shape
    if SMALL_TILES or key.dtype == torch.float32:
        # In the interpreter, one and several, so that tests cover both.
        return SMALL_PRODUCTS, 1 + slots % 2 if INTERPRETED else 1
    programs, available = batch * heads * cdiv(slots, PRODUCTS.rows), multiprocessors(key.device)
    chosen = PRODUCTS if programs >= MANY * available else PRODUCTS_OF_FEW
    if head_dim > 128:
        chosen = chosen._replace(tile=chosen.tile // 2, registers=None)
    wanted = chosen.programs * available // (batch * heads * cdiv(slots, chosen.rows))
    return chosen, max(1, min(wanted, chosen.splits))


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
        rows, width = batch * heads, padded_slots(slots)
        _, splits = products_of(self.key)
        whole, real, wide = torch.int32, torch.float32, torch.int64
        self._between = Scratch(
            age=self._buffer(rows, slots, dtype=whole), by_age=self._buffer(rows, width, dtype=whole),
            factors=self._buffer(rows, width, dtype=real), inverses=self._buffer(rows, width, dtype=real),
            left_out=self._buffer(rows, width, dtype=wide), latest=self._buffer(splits, rows, width, dtype=whole),
            means=self._buffer(rows, width, dtype=real), importance=self._buffer(rows, width, dtype=real),
            sums=self._buffer(rows, head_dim, dtype=wide),
            parts=self._buffer(2, rows, observers, cdiv(slots, 16), dtype=real),
        )

    def _clear(self) -> None:
        self._window_positions.fill_(-1)
        self._between.sums.zero_()                                              # in case a launch was interrupted

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
            self._counts, self._score, *self._between, self.scale, config.softcap, config.capacity, count,
            config.kernel_size, config.mix_lambda, config.threshold, config.exempts_first, config.order == "score",
            appended,
        )


@operation(
    "kvtwin::r_kv_score",
    mutates_args=("score", *Scratch._fields),
)
def score_due(
    window_query: Tensor, window_positions: Tensor, key: Tensor, occupied: Tensor, token_index: Tensor,
    valid_seen: Tensor, counts: Tensor, score: Tensor, age: Tensor, by_age: Tensor, factors: Tensor, inverses: Tensor,
    left_out: Tensor, latest: Tensor, means: Tensor, importance: Tensor, sums: Tensor, parts: Tensor, scale: float,
    softcap: float | None, capacity: int, count: int, kernel_size: int, mix_lambda: float, threshold: float,
    exempts_first: bool, by_score: bool, appended: bool,
) -> None:
    """Store the scores of heads with more than `capacity` tokens, after `count` tokens arrived. The tokens that arrived
    in other heads, unless `appended`, get +inf. by_score: the tokens are in the order of the scores of the last time.

    window_query [B, Hq, W, D] and window_positions [B, W] int64: the queries of the last tokens, -1 for padding. A
    state's buffers as in `ops.arrive`; valid_seen and counts include the new tokens; the others: a Scratch.
    """
    batch, heads, slots, head_dim = key.shape
    window, end, width, splits = window_positions.shape[1], capacity + count, by_age.shape[1], latest.shape[0]
    products, _ = products_of(key)
    tile = 16 if SMALL_TILES or key.dtype == torch.float32 else TILE // 2 if head_dim > 128 else TILE
    tiles, batch_heads = cdiv(end, tile), batch * heads
    shape = {"HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim)}
    sizes = capacity, end, slots, width, heads, window
    options = {"GROUP": window_query.shape[1] // heads, "QUERIES": QUERIES, "TILE": tile, "num_warps": WARPS, **shape}
    registers = {} if products.registers is None else {"maxnreg": products.registers}
    with on_device_of(key):
        prepare_kernel[(batch_heads * tiles,)](
            window_query, window_positions, key, occupied, token_index, valid_seen, counts, age, by_age, factors,
            inverses, left_out, sums, parts, score if by_score else None, *logit_factors(scale, softcap), *sizes,
            parts.shape[3],
            BY_SCORE=by_score, OTHERS=OTHERS, **options,
        )
        latest_kernel[(batch_heads * splits * cdiv(end, products.rows),)](
            key, counts, factors, inverses, by_age, latest, threshold, capacity, end, slots, width, splits,
            ROWS=products.rows, TILE=products.tile, ROUND=products.round, CHUNK=CHUNK, num_warps=products.warps,
            num_stages=products.stages, **registers, **shape,
        )
        importance_kernel[(batch_heads * tiles,)](
            window_query, window_positions, key, counts, by_age, factors, inverses, left_out, sums, parts, latest,
            means, importance, *logit_factors(scale, softcap), *sizes, parts.shape[3], splits, MERGED=MERGED,
            EXEMPTS_FIRST=exempts_first, **options,
        )
        mix_kernel[(batch_heads,)](
            window_positions, occupied, counts, age, left_out, sums, means, importance, score, mix_lambda,
            1.0 - mix_lambda, *sizes, kernel_size, APPENDED=appended, CHUNK=CHUNK, num_warps=MIXING_WARPS, **shape,
        )
