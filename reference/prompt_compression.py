"""The tokens of a prompt that SnapKV and LongFlow keep: those with the most attention from its last queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._ranks import of_all_ranks
from .attention import INF, causal_logits, softmax, sum_in_order
from .blocks import group_mean
from .contract import Sizes
from .contract.arguments import check_flag, check_integer, check_kernel_size, check_mask, resolve_scale
from .contract.attention import check_attention
from .contract.ranks import ProcessGroup, check_process_group, check_shared_heads, digest
from .contract.results import CompressResult
from .selection import gather_tokens, kept_tokens, order


def score_prompt(
    query_window: Tensor, key: Tensor, occupied: Tensor | None = None, *, kernel_size: int = 5,
    shared_heads: bool = False, scale: float | None = None, process_group: ProcessGroup | None = None,
    prefix_alone: bool = False, softcap: float | None = None, sink_logits: Tensor | None = None,
) -> Tensor:
    """`window_score`. prefix_alone: the softmax runs over the prefix alone, as in LongFlow's released code. softcap,
    sink_logits: of the logits; see `attention`."""
    occupied, sizes = check_window(query_window, key, key, occupied, kernel_size, shared_heads)
    check_shared_heads(
        process_group, shared_heads, query_window, key, occupied, kernel_size=kernel_size, scale=scale,
        prefix_alone=prefix_alone,
    )
    window = query_window.shape[2]
    prefix = sizes.slots - window
    observing = occupied[:, prefix:]                                                      # [B, W]
    scale = resolve_scale(scale, sizes.head_dim)
    logit = causal_logits(query_window, key, occupied, scale=scale, softcap=softcap)      # [B, Hq, W, T]
    if prefix_alone:
        logit[..., prefix:] = -INF
    weight = softmax(logit, sink_logits)
    weight = weight.masked_fill(~observing[:, None, :, None], 0)
    received = sum_in_order(weight, 2) / observing.sum(-1).clamp_min(1)[:, None, None]    # [B, Hq, T]
    received = group_mean(received, sizes.key_value_heads)                                # [B, Hkv, T]
    if shared_heads:
        received = of_all_ranks(received, 1, process_group)
        received = sum_in_order(received, 1)[:, None] / received.shape[1]
    score = torch.full_like(received, INF)
    if prefix:
        score[..., :prefix] = functional.avg_pool1d(
            received[..., :prefix], kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True
        )
    score = score.masked_fill(~occupied[:, None], -INF)
    return score[:, 0] if shared_heads else score


def compress_prompt(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *, kernel_size: int = 5,
    occupied: Tensor | None = None, protected: Tensor | None = None, shared_heads: bool = False,
    scale: float | None = None, process_group: ProcessGroup | None = None, prefix_alone: bool = False,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> CompressResult:
    """`compress`. prefix_alone, softcap, sink_logits: see `score_prompt`."""
    check_integer("budget", budget, minimum=0)
    occupied, sizes = check_window(query_window, key, value, occupied, kernel_size, shared_heads)
    if protected is not None:
        check_mask("protected", protected, (sizes.batch, sizes.slots), "[B, T]", key, "key")
    if process_group is not None:
        check_process_group(process_group, budget=budget, protected=digest(protected))
    score = score_prompt(
        query_window, key, occupied, kernel_size=kernel_size, shared_heads=shared_heads, scale=scale,
        process_group=process_group, prefix_alone=prefix_alone, softcap=softcap, sink_logits=sink_logits,
    )
    if not shared_heads:
        occupied = occupied[:, None].expand(score.shape)
        protected = None if protected is None else protected[:, None].expand(score.shape)
    kept = kept_tokens(_rank(score, occupied, protected), occupied, min(budget, sizes.slots))  # [B, N] or [B, Hkv, N]
    return CompressResult(gather_tokens(key, kept), gather_tokens(value, kept), kept)


def check_window(
    query_window: object, key: object, value: object, occupied: Tensor | None, kernel_size: object,
    shared_heads: object,
) -> tuple[Tensor, Sizes]:
    """Check a prompt and its window. Returns occupied [B, T], by default all True, and the sizes."""
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


def _rank(score: Tensor, occupied: Tensor, protected: Tensor | None) -> Tensor:
    """The order of eviction as integers, lowest first: score [B, S] or [B, Hkv, S] -> the same shape, int64.

    Tokens are ordered by score, ties (such as the window's +inf) by index. Protected tokens rank above all others,
    unoccupied positions below.
    """
    slots = score.shape[-1]
    rank = order(score) - 2 * slots * ~occupied
    return rank if protected is None else rank + 2 * slots * (protected & occupied)
