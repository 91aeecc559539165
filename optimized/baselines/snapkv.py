"""SnapKV on the GPU: the attention of the window's queries, without a [W, T] matrix in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.baselines.snapkv import SnapKVConfig
from ...reference.contract.arguments import resolve_scale
from ...reference.contract.ranks import ProcessGroup
from ...reference.contract.results import AttendResult, CompressResult
from .._common.block_cache import kernels as kernels
from .._common.block_cache import ops
from .._common.block_cache.compress import between, weigh_window
from .._common.block_cache.compress import compress as compress_cache
from .._common.block_cache.observe import observe
from .._common.block_cache.pooled_choice import choose_pooled
from .._common.block_cache.state import Block, BlockState, check_block
from .._common.prompts import prompt_selection
from .._common.prompts.compression import choose, gather_tokens, score_prompt

__all__ = ["AttendResult", "CompressResult", "SnapKVConfig", "SnapKVState", "attend", "compress", "window_score"]


def window_score(
    query_window: Tensor, key: Tensor, occupied: Tensor | None = None, *,
    kernel_size: int = 5, shared_heads: bool = False, scale: float | None = None,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """The score of each prompt token: the pooled attention that it receives from the queries of the window.

    query_window [B, Hq, W, D], the queries of the last W of the T tokens; key [B, Hkv, T, D], post-RoPE; occupied
    [B, T] bool, by default all. Returns [B, Hkv, T], or [B, T] averaged over all heads with shared_heads=True, float32;
    +inf for window tokens, -inf for unoccupied ones. process_group: with shared_heads, the ranks that hold the other
    heads. Semantics: `kvtwin.reference.baselines.snapkv.window_score`.
    """
    return score_prompt(query_window, key, occupied, kernel_size, shared_heads, scale, process_group, False)


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> AttendResult:
    """Attention of the tokens in the last Q slots; received = the mean weight of each key over the block's queries.

    Arguments and errors as in `h2o.attend`. Semantics: `kvtwin.reference.baselines.snapkv.attend`.
    """
    scale = resolve_scale(scale, check_block(query, key, value, occupied, key_scale, value_scale).head_dim)
    key, value, stored = kernels.codes(key, value, key_scale, value_scale)
    output, softmax_parts = kernels.attend(query, key, value, occupied, scale, stored=stored)
    received = kernels.received(query, key, occupied, softmax_parts, scale, mean=True, stored=stored)
    return AttendResult(output, received)


def compress(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *,
    kernel_size: int = 5, occupied: Tensor | None = None, protected: Tensor | None = None,
    shared_heads: bool = False, scale: float | None = None, process_group: ProcessGroup | None = None,
) -> CompressResult:
    """Keep the `budget` best tokens of a prompt (SnapKV). Semantics: `kvtwin.reference.baselines.snapkv.compress`."""
    kept = choose(
        query_window, key, value, budget, kernel_size=kernel_size, occupied=occupied, protected=protected,
        shared_heads=shared_heads, scale=scale, process_group=process_group,
    )
    return CompressResult(gather_tokens(key, kept), gather_tokens(value, kept), kept)


class SnapKVState(BlockState):
    """A SnapKV cache. `score` is the pooled attention from the queries of the last `window` tokens to the cached
    tokens, +inf for the window itself. The pool runs along the cached tokens in the order of their positions.

    After a block or decode step, a KV head of a row with at least budget + interval tokens is due: its scores are
    recomputed, and it evicts down to the budget. With an interval of 1, all scores are recomputed after every block,
    even without evictions. With a longer interval, heads that are not due compute no scores, and newer tokens have
    +inf. The device decides which heads are due, from its own token counts. A step without evictions costs attention
    and three launches whose programs return at once.
    """

    Config = SnapKVConfig
    _rows = (*BlockState._rows, "_window_query", "_window_positions", "_order")
    _rule = "append"
    _library_attends = True

    def _allocate(self) -> None:
        batch, query_heads, heads, _, head_dim = self.sizes
        observers = self.config.observers
        # A ring: the query of position p is at index p % observers.
        self._window_query = self._buffer(batch, query_heads, observers, head_dim, dtype=self.dtype)
        self._window_positions = self._buffer(batch, observers, dtype=torch.int64)
        self._order = self._buffer(batch, heads, self.config.budget, dtype=torch.int32)
        self._window = self._window_query, self._window_positions
        self._between = between(self.sizes, observers, self.device)
        #: Of the window's attention: zeros between launches.
        self._window_counters = self._buffer(kernels.counters_of(self.sizes, observers), dtype=torch.int32)

    def _clear(self) -> None:
        self._window_positions.fill_(-1)
        self._window_counters.zero_()
        self._order.copy_(torch.arange(self.config.budget, device=self.device))

    def _take_prompt(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor | None:
        config, total = self.config, query.shape[2]
        if total <= config.capacity:
            return None
        self._start_change("prefill")
        output = self._attend_prompt(query, key, value, valid, padded=False)
        observe(query, valid, self._seen, self._window_query, self._window_positions)
        window = query[:, :, -config.observers:]
        received = prompt_selection.received(window, key, valid, self.scale)
        best = prompt_selection.choose(
            received.view(-1, 1, total), None, None, config.budget, config.observers, config.kernel_size, key.shape[1]
        )
        prompt_selection.fill(
            key, value, *best, self.key, self.value, self.occupied, self.positions, None, self._score,
            self._token_index,
        )
        assert self._counts is not None
        self._counts.fill_(config.budget)
        self._valid_seen.fill_(total)
        self._seen.fill_(total)
        self._end_change()
        return output

    def _early(self, count: int) -> bool:
        # The attention of a block that has the whole window has its softmaxes.
        return self.config.interval == 1 and count < self.config.observers

    def _evict(self, block: Block, count: int) -> None:
        assert block.softmax_parts is not None
        config, end = self.config, block.end
        if config.interval > 1 or not block.softmax_parts.numel():
            self._prepare(block)
            self._compress(count, self._between.received, appended=False)
            return
        last = slice(-config.observers, None)
        received = kernels.received(
            block.query[:, :, last], self.key[:, :, :end], self.occupied[..., :end], block.softmax_parts[..., last],
            self.scale, mean=True, softcap=self.config.softcap,
        )
        if ops.at_once(end, count):
            ops.settle(
                self._choose_pooled(received, count, in_block=True), self.key, self.value, self.occupied,
                self.positions, self._score, self._token_index, None, config.budget, apart=False,
            )
        else:
            self._observe(block)
            self._compress(count, received, appended=False)

    def _after(self, query: Tensor, valid: Tensor, count: int) -> None:
        # Of blocks that have a whole window, only the last one's is needed, by steps and smaller blocks.
        if self.config.interval == 1 and not self._early(count):
            observe(query, valid, self._seen, self._window_query, self._window_positions, counted=True)

    def _finish_step(self, query: Tensor) -> None:
        self._weigh_window(1)
        self._compress(1, self._between.received, appended=True)

    def _prepare(self, block: Block) -> None:
        self._observe(block)
        self._weigh_window(block.query.shape[2])

    def _choose(self, prepared: None, count: int) -> Tensor:
        received, budget = self._between.received, self.config.budget
        if ops.at_once(budget + count, count):
            return self._choose_pooled(received, count, in_block=False)
        self._compress(count, received, appended=False, moves=False)
        return self._between.numbers[3].view(self.occupied.shape)[..., budget : budget + count]

    def _choose_pooled(self, received: Tensor, count: int, *, in_block: bool) -> Tensor:
        config = self.config
        assert self._counts is not None
        return choose_pooled(
            self._window_positions, received, self.occupied, self._score, self._seen, self._counts, self._order,
            self._between.numbers, config.budget, count, config.kernel_size, in_block,
        )

    def _observe(self, block: Block) -> None:
        observe(block.query, block.valid, self._seen, self._window_query, self._window_positions)

    def _weigh_window(self, count: int) -> None:
        softmax_parts, received, _ = self._between
        weigh_window(
            self._window_query, self._window_positions, self.key, self.occupied, self.positions, self._counts,
            softmax_parts, received, self._window_counters, self.sink_logits, self.scale, self.config.softcap,
            self.config.budget, self.config.capacity, count,
        )

    def _compress(self, count: int, received: Tensor, *, appended: bool, moves: bool = True) -> None:
        config, numbers = self.config, self._between.numbers
        compress_cache(
            self._window_positions, received, self.key, self.value, self.occupied, self.positions, self._score,
            self._token_index, self._valid_seen, self._seen, self._counts, self._order, numbers, config.budget,
            config.capacity, count, config.kernel_size, appended, moves,
        )
