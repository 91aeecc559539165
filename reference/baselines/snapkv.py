"""SnapKV: keep the prompt tokens that receive the most attention from the last queries.

Paper: Li et al., "SnapKV: LLM Knows What You Are Looking for Before Generation" (2024, arXiv 2404.14469).
The score of a prefix token is its softmax weight over all keys (causal), averaged over the queries of the observation
window and smoothed by an average pool along the prefix. The window itself is kept. `compress` reduces a prompt once, as
in LongFlow section 4.1. `SnapKVState` evicts after every block of tokens (KeyDiff A.1), or at longer intervals, as
LongFlow's comparisons do for generated text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, per_kv_head, softmax, sum_in_order
from ..blocks import AttendResult, Chunk, IntervalConfig, attention_of_block, group_mean
from ..contract.arguments import check_integer, check_kernel_size
from ..contract.ranks import ProcessGroup
from ..contract.results import CompressResult
from ..prompt_compression import compress_prompt, score_prompt
from ..selection import order
from ..window import WindowedState

__all__ = ["AttendResult", "CompressResult", "SnapKVConfig", "SnapKVState", "attend", "compress", "window_score"]


@dataclass(frozen=True)
class SnapKVConfig(IntervalConfig):
    """Configuration of a SnapKV cache.

    budget, block_size: see `BlockConfig`. window: the number of last tokens that observe and are kept, of which at most
    budget count. kernel_size: the width of the average pool, odd. interval: see `IntervalConfig`. Raises TypeError or
    ValueError for invalid arguments.
    """

    window: int = 32
    kernel_size: int = 5
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("window", self.window, minimum=1)
        check_kernel_size(self.kernel_size)

    @property
    def observers(self) -> int:
        """The number of last tokens that observe and are protected."""
        return min(self.window, self.budget)


def window_score(
    query_window: Tensor, key: Tensor, occupied: Tensor | None = None, *,
    kernel_size: int = 5, shared_heads: bool = False, scale: float | None = None,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """The score of each prompt token: the pooled attention that it receives from the queries of the window.

    query_window [B, Hq, W, D], the queries of the last W of the T tokens; key [B, Hkv, T, D], post-RoPE; occupied
    [B, T] bool, by default all. Queries at unoccupied positions (padding) are ignored. kernel_size: the width of the
    average pool along the prefix (tokens 0 to T - W - 1), odd, with zeros beyond both ends of the prefix.
    process_group: with shared_heads, the ranks that hold the other heads, whose average all of them return.
    Returns [B, Hkv, T], or [B, T] averaged over all heads with shared_heads=True, float32 (float64 for float64 inputs):
    +inf for tokens of the window, -inf for unoccupied positions. TypeError or ValueError for invalid arguments.
    """
    return score_prompt(
        query_window, key, occupied, kernel_size=kernel_size, shared_heads=shared_heads, scale=scale,
        process_group=process_group,
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> AttendResult:
    """Attention of the tokens in the last Q slots; received = the mean weight of each key over the block's queries.

    Arguments, output and errors as in `h2o.attend`. Queries at unoccupied slots are ignored. received [B, Hkv, S] is
    the mean over the G query heads of a KV head, without pooling.
    """
    output, weight = attention_of_block(                                                # weight [B, Hkv, Q, S]
        query, key, value, occupied, scale=scale, key_scale=key_scale, value_scale=value_scale
    )
    num_valid = per_kv_head(occupied)[..., -query.shape[2]:].sum(-1).clamp_min(1)       # [B, 1 or Hkv]
    return AttendResult(output, sum_in_order(weight, 2) / num_valid[..., None])


def compress(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *,
    kernel_size: int = 5, occupied: Tensor | None = None, protected: Tensor | None = None,
    shared_heads: bool = False, scale: float | None = None, process_group: ProcessGroup | None = None,
) -> CompressResult:
    """Keep the `budget` best tokens of a prompt.

    Shapes and process_group as in `window_score`; value like key; protected [B, T] bool, by default none; budget an int
    >= 0, and a budget of at least T keeps all tokens. Protected tokens are preferred, then tokens of the window (the
    newest first), then prefix tokens by score. Ties evict the lowest index. Returns N = min(budget, T) tokens per row.
    TypeError or ValueError for invalid arguments.
    """
    return compress_prompt(
        query_window, key, value, budget, kernel_size=kernel_size, occupied=occupied, protected=protected,
        shared_heads=shared_heads, scale=scale, process_group=process_group,
    )


class SnapKVState(WindowedState):
    """A SnapKV cache, see `BlockState`.

    `score` is the pooled attention from the queries of the last `window` tokens to the cached tokens, +inf for the
    window itself. The pool runs along the cached tokens in the order of their positions.

    After a block or decode step, a KV head of a row with at least budget + interval tokens is due: its scores are
    recomputed, and it evicts down to the budget. With an interval of 1, all scores are recomputed after every block.
    With a longer interval, KV heads that are not due compute no scores: their tokens keep the scores of the last
    eviction, and newer tokens have +inf. The number of tokens decides, not the number of steps, so rows with padding
    evict at other steps than rows without.
    """

    Config = SnapKVConfig

    def _observe(self, chunk: Chunk) -> None:
        observers, heads = self.config.observers, self.sizes.key_value_heads
        weight = softmax(self._observe_window(chunk).flatten(1, 2), self.sink_logits)     # [B, Hq, W, S]
        observing = (self._window_positions >= 0).sum(-1).clamp_min(1)[:, None, None]
        received = sum_in_order(group_mean(weight, heads), 2) / observing               # [B, Hkv, S]

        window = self.positions >= self._seen - observers
        place = order(self.positions)                                                   # free slots come first
        in_order = torch.zeros_like(received).scatter(-1, place, received.masked_fill(window, 0))
        size = self.config.kernel_size
        pooled = functional.avg_pool1d(in_order, size, stride=1, padding=size // 2, count_include_pad=True)
        score = pooled.gather(-1, place).masked_fill(window, INF)
        if self.config.interval > 1:
            is_new = torch.arange(self.sizes.slots, device=self.device) >= self.config.capacity
            score = torch.where(self._due(), score, self.score.masked_fill(is_new, INF))
        self.score.copy_(score.masked_fill(~self.occupied, -INF))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self.occupied & (self.positions >= self._seen - self.config.observers)
