"""SnapKV (Li et al. 2024): a prompt compressed by what its last queries look at.

Score of a prefix token = mean over the observation window's queries of the softmax over all keys (causal), smoothed
by an average pool along the prefix; the window itself is kept. `compress` does it once, as LongFlow section 4.1 uses it
for prompts; `SnapKVState` does it again after every block of tokens (KeyDiff A.1), or once in so many of them, as
LongFlow's comparisons compress generated text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, causal_logits, logits, per_kv_head, softmax
from ..blocks import AttendResult, BlockConfig, BlockState, Piece, attention_of_block, group_mean, order
from ..contract import Sizes, check_attention, check_flag, check_integer, check_mask, resolve_scale
from ..selection import kept_after

__all__ = ["AttendResult", "CompressResult", "SnapKVConfig", "SnapKVState", "attend", "compress", "window_score"]


@dataclass(frozen=True)
class SnapKVConfig(BlockConfig):
    """budget, block_size: see `BlockConfig`. window: the last tokens, which observe and stay; at most budget of them
    do. kernel_size: odd, the width of the average pool. interval: a KV head of a row is compressed to its budget when
    it holds at least budget + interval tokens; 1: whenever it holds more than the budget. Raises TypeError or
    ValueError for anything else."""

    window: int = 32
    kernel_size: int = 5
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("window", self.window, minimum=1)
        check_kernel_size(self.kernel_size)
        check_integer("interval", self.interval, minimum=1)

    @property
    def capacity(self) -> int:
        """The most tokens that are held between calls: budget + interval - 1."""
        return self.budget + self.interval - 1

    @property
    def observers(self) -> int:
        """How many of the last tokens observe and are protected."""
        return min(self.window, self.budget)


class CompressResult(NamedTuple):
    """A compressed prompt.

    key, value: [B, Hkv, N, D], zero where nothing is kept. kept: the tokens' indices in the prompt, ascending, -1 at
    the end of rows that had fewer: [B, N] int64, or [B, Hkv, N] where heads choose for themselves.
    """

    key: Tensor
    value: Tensor
    kept: Tensor


def window_score(
    query_window: Tensor, key: Tensor, occupied: Tensor | None = None, *,
    kernel_size: int = 5, shared_heads: bool = False, scale: float | None = None,
) -> Tensor:
    """The pooled attention that each token of the prefix receives from the window's queries.

    query_window [B, Hq, W, D], the queries of the last W of the T tokens; key [B, Hkv, T, D], post-RoPE; occupied
    [B, T] bool, default all. Queries at unoccupied positions (padding) do not count. kernel_size: odd, the width of
    the average pool along the prefix (tokens 0 to T - W - 1), zeros beyond both of its ends counted.
    Returns [B, Hkv, T], or [B, T] averaged over all heads with shared_heads=True, in float32 (float64 for float64).
    Window tokens score +inf, unoccupied ones -inf.
    """
    occupied, sizes = check_window(query_window, key, key, occupied, kernel_size, shared_heads)
    window = query_window.shape[2]
    prefix = sizes.slots - window
    observing = occupied[:, prefix:]                                                      # [B, W]
    scale = resolve_scale(scale, sizes.head_dim)
    weight = softmax(causal_logits(query_window, key, occupied, scale=scale))             # [B, Hq, W, T]
    weight = weight.masked_fill(~observing[:, None, :, None], 0)
    received = weight.sum(2) / observing.sum(-1).clamp_min(1)[:, None, None]              # [B, Hq, T]
    received = received.view(sizes.batch, sizes.key_value_heads, sizes.group, -1).mean(2)  # [B, Hkv, T]
    if shared_heads:
        received = received.mean(1, keepdim=True)
    score = torch.full_like(received, INF)
    if prefix:
        score[..., :prefix] = functional.avg_pool1d(
            received[..., :prefix], kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True
        )
    score = score.masked_fill(~occupied[:, None], -INF)
    return score[:, 0] if shared_heads else score


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None
) -> AttendResult:
    """Attention of a block of the newest tokens; received = the mean of each key's weights over the block's queries.

    query [B, Hq, Q, D], the queries of the tokens in the last Q slots, causal among themselves; key, value
    [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool; scale defaults to D ** -0.5. A query at an unoccupied slot
    gives zeros and does not count. received [B, Hkv, S]: the mean over the G query heads of a KV head, not pooled.
    TypeError, ValueError for bad arguments.
    """
    output, weight = attention_of_block(query, key, value, occupied, scale=scale)       # weight [B, Hkv, Q, S]
    real = per_kv_head(occupied)[..., -query.shape[2]:].sum(-1).clamp_min(1)            # [B, 1 or Hkv]
    return AttendResult(output, weight.sum(2) / real[..., None])


def compress(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *,
    kernel_size: int = 5, occupied: Tensor | None = None, protected: Tensor | None = None,
    shared_heads: bool = False, scale: float | None = None,
) -> CompressResult:
    """Keep the `budget` best tokens of a prompt (SnapKV).

    Shapes as in `window_score`, value like key. Order of preference: protected tokens, window tokens (the newest
    first), prefix tokens by score; among equals the lowest index goes. protected [B, T] bool, default none.
    budget: int >= 0; a budget of at least T keeps everything. Returns N = min(budget, T) places per row.
    """
    check_integer("budget", budget, minimum=0)
    occupied, sizes = check_window(query_window, key, value, occupied, kernel_size, shared_heads)
    if protected is not None:
        check_mask("protected", protected, (sizes.batch, sizes.slots), "[B, T]", key, "key")
    score = window_score(
        query_window, key, occupied, kernel_size=kernel_size, shared_heads=shared_heads, scale=scale
    )
    if not shared_heads:
        occupied = occupied[:, None].expand(score.shape)
        protected = None if protected is None else protected[:, None].expand(score.shape)
    kept = kept_after(_rank(score, occupied, protected), min(budget, sizes.slots))        # [B, N] or [B, Hkv, N]
    holds = occupied.gather(-1, kept)
    # Places without a token go to the end; the others keep their order.
    order = (~holds).to(torch.int8).sort(dim=-1, stable=True).indices
    kept = kept.masked_fill(~holds, -1).gather(-1, order)
    return CompressResult(gather_tokens(key, kept), gather_tokens(value, kept), kept)


def gather_tokens(tensor: Tensor, kept: Tensor) -> Tensor:
    """tensor [B, Hkv, T, D] at kept [B, N] or [B, Hkv, N]; -1 gives zeros."""
    index = kept if kept.dim() == 3 else kept[:, None].expand(-1, tensor.shape[1], -1)
    index = index[..., None].expand(-1, -1, -1, tensor.shape[-1])
    return tensor.gather(2, index.clamp_min(0)).masked_fill(index < 0, 0)


def check_window(
    query_window: object, key: object, value: object, occupied: Tensor | None, kernel_size: object,
    shared_heads: object,
) -> tuple[Tensor, Sizes]:
    """Validates a prompt and its window; returns occupied (default all) and the sizes."""
    sizes = check_attention(query_window, key, value, steps="T", time="W", name="query_window")
    assert isinstance(query_window, Tensor) and isinstance(key, Tensor)
    check_flag("shared_heads", shared_heads)
    check_kernel_size(kernel_size)
    if query_window.shape[2] > sizes.slots:
        raise ValueError(
            f"query_window must be [B, Hq, W, D] with W <= T = {sizes.slots}, got {tuple(query_window.shape)}"
        )
    if occupied is None:
        return torch.ones(sizes.batch, sizes.slots, dtype=torch.bool, device=key.device), sizes
    check_mask("occupied", occupied, (sizes.batch, sizes.slots), "[B, T]", key, "key")
    return occupied, sizes


def check_kernel_size(kernel_size: object) -> None:
    if check_integer("kernel_size", kernel_size, minimum=1) % 2 == 0:
        raise ValueError(f"kernel_size must be odd, so that the pool has a centre, got {kernel_size}")


def _rank(score: Tensor, occupied: Tensor, protected: Tensor | None) -> Tensor:
    """The order of eviction as integers, so that classes need no magic scores: [B, S] or [B, Hkv, S] int64.

    A token's rank is the number of tokens that go before it by score (among the window's +inf that is recency);
    protected tokens rank above all of these, unoccupied places below.
    """
    slots = score.shape[-1]
    going = score.masked_fill(score.isnan(), -INF).sort(dim=-1, stable=True).indices
    place = torch.arange(slots, device=score.device).expand(score.shape)
    rank = torch.empty_like(going).scatter(-1, going, place) - 2 * slots * ~occupied
    return rank if protected is None else rank + 2 * slots * (protected & occupied)


class SnapKVState(BlockState):
    """A SnapKV cache. `score` is the pooled attention of the last `window` tokens' queries over the tokens then held,
    +inf for these tokens themselves. The pool runs along the tokens held, in the order of their positions.

    A KV head of a row that holds at least budget + interval tokens after a block (or decode step) is compressed: its
    scores are newly taken, and `budget` tokens stay. With an interval of 1, scores are newly taken after every block,
    also where nothing has to go. With a longer one, heads that are not compressed observe nothing: their tokens keep
    the scores of the last compression, and those that came since have +inf, as if in the window. What a head holds
    decides, and not the number of steps: rows with padding are compressed at other steps than the rest.
    """

    Config = SnapKVConfig
    _per_row = ("_window_query", "_window_positions")

    @torch.inference_mode(False)
    def reset(self) -> None:
        super().reset()
        batch, query_heads, _, _, head_dim = self.sizes
        shape = (batch, query_heads, self.config.observers, head_dim)
        self._window_query = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._window_positions = torch.full(
            (batch, self.config.observers), -1, dtype=torch.int64, device=self.device
        )

    def _observe(self, piece: Piece) -> None:
        observers, heads = self.config.observers, self.sizes.key_value_heads
        query = piece.query.masked_fill(~piece.real[:, None, :, None], 0)
        self._window_query.copy_(torch.cat((self._window_query, query), 2)[:, :, -observers:])
        arrived = piece.positions.where(piece.real, -1)                                 # [B, Q]
        self._window_positions.copy_(torch.cat((self._window_positions, arrived), 1)[:, -observers:])

        logit = logits(self._window_query, self.key, self.occupied, scale=self.scale)   # [B, Hq, W, S]
        future = self.positions[:, :, None] > self._window_positions[:, None, :, None]  # [B, Hkv, W, S]
        future = future.repeat_interleave(self.sizes.group, dim=1)
        weight = softmax(logit.masked_fill(future, -INF))
        observing = (self._window_positions >= 0).sum(-1).clamp_min(1)[:, None, None]
        received = group_mean(weight, heads).sum(2) / observing                         # [B, Hkv, S]

        window = self.positions >= self._seen - observers
        place = order(self.positions)                                                   # free slots come first
        in_order = torch.zeros_like(received).scatter(-1, place, received.masked_fill(window, 0))
        size = self.config.kernel_size
        pooled = functional.avg_pool1d(in_order, size, stride=1, padding=size // 2, count_include_pad=True)
        score = pooled.gather(-1, place).masked_fill(window, INF)
        if self.config.interval > 1:
            came = torch.arange(self.sizes.slots, device=self.device) >= self.config.capacity
            score = torch.where(self._due(), score, self.score.masked_fill(came, INF))
        self.score.copy_(score.masked_fill(~self.occupied, -INF))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self.occupied & (self.positions >= self._seen - self.config.observers)
