"""The tokens of a prompt that SnapKV and LongFlow keep, for prompts that stay tensors of the caller."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....reference.contract.arguments import check_flag, check_integer, check_mask, resolve_scale
from ....reference.contract.attention import check_attention
from ....reference.contract.ranks import ProcessGroup, check_process_group, check_shared_heads, digest
from ..launch import check_kernel_sizes, check_launchable
from ..ranks import ranks_of
from . import prompt_selection


def score_prompt(
    query_window: Tensor, key: Tensor, occupied: Tensor | None, kernel_size: int, shared_heads: bool,
    scale: float | None, process_group: ProcessGroup | None, prefix_alone: bool,
) -> Tensor:
    """`window_score`. prefix_alone: see `prompt_selection.received`."""
    occupied = _check(query_window, key, key, occupied, kernel_size, shared_heads)
    check_shared_heads(
        process_group, shared_heads, query_window, key, occupied, kernel_size=kernel_size, scale=scale,
        prefix_alone=prefix_alone,
    )
    head_dim, total, window = key.shape[3], key.shape[2], query_window.shape[2]
    received = prompt_selection.received(query_window, key, occupied, resolve_scale(scale, head_dim), prefix_alone)
    if (ranks := ranks_of(process_group, key.shape[1], key.device)) is not None:
        received = ranks.gather(received)
    if shared_heads:
        received = received.mean(1, keepdim=True)
    prefix = total - window
    pooled = received
    if prefix:
        padded = functional.pad(received[..., :prefix], (kernel_size // 2, kernel_size // 2))
        # Added one by one, whatever the number of threads: tokens with the same neighbours have the same sum, a tie.
        pooled = padded[..., :prefix]
        for offset in range(1, kernel_size):
            pooled = pooled + padded[..., offset : offset + prefix]
        pooled = pooled / kernel_size                                                     # [B, 1 or Hkv, prefix]
    window_part = torch.full_like(received[..., prefix:], torch.inf)
    score = torch.cat((pooled[..., :prefix], window_part), -1).masked_fill(~occupied[:, None], -torch.inf)
    return score.squeeze(1) if shared_heads else score


def choose(
    query_window: Tensor, key: Tensor, value: Tensor, budget: int, *, kernel_size: int, occupied: Tensor | None,
    protected: Tensor | None, shared_heads: bool, scale: float | None, process_group: ProcessGroup | None = None,
    prefix_alone: bool = False,
) -> Tensor:
    """The `kept` of `compress`: [B, N] or [B, Hkv, N] int64, ascending, -1 at the end. prefix_alone: see
    `prompt_selection.received`."""
    check_integer("budget", budget, minimum=0)
    occupied = _check(query_window, key, value, occupied, kernel_size, shared_heads)
    batch, _, total, _ = key.shape
    if protected is not None:
        check_mask("protected", protected, (batch, total), "[B, T]", key, "key")
    if process_group is not None:
        check_process_group(process_group, budget=budget, protected=digest(protected))
    score = score_prompt(query_window, key, occupied, kernel_size, shared_heads, scale, process_group, prefix_alone)
    # One unique integer per token that orders tokens by class, then score (float32 bits made sortable), then index.
    # The index has 29 bits, for prompts of fewer than 2^29 tokens.
    score = score.masked_fill(score.isnan(), -torch.inf) + 0.0
    bits = score.view(torch.int32)
    code = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    row = (slice(None),) if shared_heads else (slice(None), None)
    if protected is not None:
        code = torch.where(protected[row], code + 2**32, code)
    code = code.masked_fill(~occupied[row], -(2**32))
    token = torch.arange(total, device=key.device)
    best = ((code << 29) + token).topk(min(budget, total), -1).indices
    # Sort ascending, with the entries of unoccupied tokens behind all others.
    holds = occupied[row].expand(score.shape).gather(-1, best)
    kept = best.masked_fill(~holds, total).sort(-1).values
    return kept.masked_fill(kept == total, -1)


def gather_tokens(tensor: Tensor, kept: Tensor) -> Tensor:
    """tensor [B, Hkv, T, D] at kept [B, N] or [B, Hkv, N]; zeros where kept is -1, even if the tensor holds NaN."""
    batch, heads, _, _ = tensor.shape
    index = kept[:, None] if kept.dim() == 2 else kept
    index = index.expand(batch, heads, -1)
    rows = torch.take_along_dim(tensor, index.clamp_min(0)[..., None], dim=2)
    return torch.where((index >= 0)[..., None], rows, rows.new_zeros(()))


def _check(
    query_window: object, key: object, value: object, occupied: Tensor | None, kernel_size: object,
    shared_heads: object,
) -> Tensor:
    """Check what the reference checks and what kernels need. Returns occupied, by default all True."""
    sizes = check_attention(query_window, key, value, steps="T", time="W", name="query_window")
    assert isinstance(query_window, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    check_flag("shared_heads", shared_heads)
    if check_integer("kernel_size", kernel_size, minimum=1) % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")
    if query_window.shape[2] > sizes.slots:
        raise ValueError(
            f"query_window must be [B, Hq, W, D] with W <= T = {sizes.slots}, got {tuple(query_window.shape)}"
        )
    check_launchable(query_window=query_window, key=key, value=value)
    check_kernel_sizes(sizes)
    if occupied is None:
        return torch.ones(sizes.batch, sizes.slots, dtype=torch.bool, device=key.device)
    check_mask("occupied", occupied, (sizes.batch, sizes.slots), "[B, T]", key, "key")
    return occupied
