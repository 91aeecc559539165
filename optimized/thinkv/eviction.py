"""ThinKV's eviction on the GPU: how many tokens past segments keep, and which ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...reference.contract.ranks import ProcessGroup, check_heads
from ...reference.contract.thinkv.arguments import check_anneal, check_segment, check_segments
from ...reference.contract.thinkv.types import AnnealResult, RepresentativesResult
from .._common.launch import check_launchable, next_power_of_2, on_device_of, stride_unit
from .._common.operation import operation
from .._common.ranks import Ranks
from . import _ranks_ops as on_ranks
from ._eviction_kernels import anneal_kernel, representatives_kernel
from ._tiles import ITERATIONS, MAX_TOKENS, packed_retention, tile

__all__ = ["anneal", "segment_representatives", "select_representatives"]


def anneal(
    size: Tensor, level: Tensor, thought: Tensor, current: Tensor, trajectory_change: Tensor, *,
    live: Tensor, budget: int, retention: Sequence[int],
) -> AnnealResult:
    """How many tokens each segment keeps (ThinKV definition 3, section 3.3.2).

    size, level, thought [B, M] int64, oldest segment first; current, live [B] int64; trajectory_change [B] bool.
    Semantics, with equal results: `kvtwin.reference.thinkv.anneal`. Does not synchronize with the host. TypeError or
    ValueError for invalid arguments, and for CPU tensors outside Triton's interpreter.
    """
    retention = check_anneal(size, level, thought, current, trajectory_change, live, budget, retention)
    check_launchable(size=size)
    return plan_anneal(size, level, thought, current, trajectory_change, live, budget, retention)


def plan_anneal(
    size: Tensor, level: Tensor, thought: Tensor, current: Tensor, trajectory_change: Tensor, live: Tensor, budget: int,
    retention: Sequence[int],
) -> AnnealResult:
    """`anneal` of a state's own tensors, without checks."""
    return AnnealResult(*_anneal(size, level, thought, current, trajectory_change, live, budget, list(retention)))


def select_representatives(
    key_segment: Tensor, keep: int, *, process_group: ProcessGroup | None = None, replicas: int = 1
) -> RepresentativesResult:
    """The tokens that represent a segment, by k-means on the keys (ThinKV section 3.3.2, D.4).

    key_segment [Hkv, L, D] or [L, F], any strides, float32, float16 or bfloat16; up to 128 tokens. Keeps exactly
    min(keep, L) tokens. process_group, replicas: the ranks with the keys of the other KV heads. Semantics:
    `kvtwin.reference.thinkv.select_representatives`. TypeError or ValueError for invalid arguments, for inputs that
    require grad, and for CPU tensors outside Triton's interpreter.
    """
    size = check_segment(key_segment, keep).shape[0]
    check_launchable(key_segment=key_segment)
    _check_tokens("key_segment", size)
    check_heads(process_group, replicas, key_segment.shape[0], keep=keep, tokens=size)
    parts = key_segment if key_segment.dim() == 3 else key_segment[None]
    if process_group is None or keep >= size:
        return RepresentativesResult(*_select(parts, keep))
    gram = on_ranks.segment_gram(parts.float().contiguous(), keep)
    every = Ranks(process_group, 1, gram.device).each(gram)
    return RepresentativesResult(*on_ranks.segment_choice(every, keep, parts.shape[2], replicas))


def segment_representatives(key: Tensor, slots: Tensor, keep: Tensor, *, most: int | None = None) -> Tensor:
    """`select_representatives` for many segments of a cache: the tokens to keep, [B, M, L] bool.

    key [B, Hkv, S, D], float32, float16 or bfloat16; slots [B, M, L] int64, L up to 128; keep [B, M] int64; any
    strides. `most`, the largest keep of a segment that shrinks, determines the tile size. Semantics:
    `kvtwin.reference.thinkv.segment_representatives`. TypeError or ValueError for invalid arguments, for inputs that
    require grad, and for CPU tensors outside Triton's interpreter. The check of the elements of slots synchronizes with
    the host. It is skipped during CUDA graph capture and torch.compile, where the keys of slots beyond S count as 0.
    """
    most = check_segments(key, slots, keep, most)
    check_launchable(key=key)
    _check_tokens("slots", slots.shape[-1])
    result: Tensor = _representatives(key, slots, keep, most)
    return result


def _check_tokens(name: str, tokens: int) -> None:
    if tokens > MAX_TOKENS:
        raise ValueError(f"{name} must have at most {MAX_TOKENS} tokens per segment, got L = {tokens}")


# Operations ----------------------------------------------------------------------------------------------------------


@operation("kvtwin::thinkv_anneal", mutates_args=())
def _anneal(
    size: Tensor, level: Tensor, thought: Tensor, current: Tensor, trajectory_change: Tensor, live: Tensor,
    budget: int, retention: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    batch, segments = size.shape
    new_size, new_level, over_budget = _annealed(size)
    with on_device_of(size):
        anneal_kernel[(batch,)](
            size, level, thought, current, trajectory_change, live, new_size, new_level, over_budget, segments, budget,
            *size.stride(), *level.stride(), *thought.stride(), *current.stride(), *trajectory_change.stride(),
            *live.stride(), RETENTION=packed_retention(retention), LEVELS=len(retention),
            SEGMENTS=max(16, next_power_of_2(segments)),
            num_warps=1 if segments <= 64 else 4 if segments <= 512 else 16,
        )
    return new_size, new_level, over_budget


@_anneal.register_fake
def _(size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _annealed(size)


def _annealed(size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for an AnnealResult."""
    return size.new_empty(size.shape), size.new_empty(size.shape), size.new_empty(size.shape[:1], dtype=torch.bool)


@operation("kvtwin::thinkv_select", mutates_args=())
def _select(key_segment: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Indices and assignments of one segment [Hkv, L, D]."""
    size, device = key_segment.shape[1], key_segment.device
    every = torch.arange(size, device=device)
    if keep >= size:
        return every, every.repeat(ITERATIONS, 1)
    indices = torch.empty(keep, dtype=torch.int64, device=device)
    assignments = torch.empty(ITERATIONS, size, dtype=torch.int64, device=device)
    counts = torch.full((1, 1), keep, dtype=torch.int64, device=device)
    # One layout and dtype: this function is for inspection; the one for many segments is optimized for speed.
    _launch(key_segment.float().contiguous()[None], every[None, None], counts, keep, indices, assignments)
    return indices, assignments


@_select.register_fake
def _(key_segment: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    size = key_segment.shape[1]
    return (
        key_segment.new_empty(min(keep, size), dtype=torch.int64),
        key_segment.new_empty((ITERATIONS, size), dtype=torch.int64),
    )


@operation("kvtwin::thinkv_representatives", mutates_args=())
def _representatives(key: Tensor, slots: Tensor, keep: Tensor, most: int) -> Tensor:
    return _launch(key, slots, keep, most)


@_representatives.register_fake
def _(slots: Tensor) -> Tensor:
    return slots.new_empty(slots.shape, dtype=torch.bool)


def _launch(
    key: Tensor, slots: Tensor, keep: Tensor, most: int, indices: Tensor | None = None,
    assignments: Tensor | None = None,
) -> Tensor:
    """k-means of every segment. If there is only one, also its indices and assignments."""
    batch, segments, length = slots.shape
    keep_mask = torch.empty(slots.shape, dtype=torch.bool, device=slots.device)
    head_dim = key.shape[3]
    unit = stride_unit(key) if head_dim % 8 == 0 else 1
    with on_device_of(key):
        representatives_kernel[(batch * segments,)](
            key, slots, keep, keep_mask, keep_mask if indices is None else indices,
            keep_mask if assignments is None else assignments, *key.shape[1:3], head_dim // unit, segments, length,
            most, *(stride // unit for stride in key.stride()[:3]), key.stride(3), *slots.stride(), *keep.stride(),
            ITERATIONS=ITERATIONS, UNIT=unit, RECORD=indices is not None, **tile(length, most, head_dim),
        )
    return keep_mask
