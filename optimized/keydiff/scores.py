"""KeyDiff's functions: the scores of all keys, and the eviction from a whole cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.contract import Sizes
from ...reference.contract.arguments import FLOATING, capturing, check_choice, check_dtype, check_integer, check_tensor
from ...reference.contract.attention import check_key_value, check_slot_mask
from ...reference.contract.scales import FP8
from ...reference.keydiff import EvictResult
from .._common.launch import check_kernel_sizes, check_launchable, fp8_codes
from .._common.radix_selection import select
from . import _ops
from ._anchors import ANCHORS, DEFAULT, SIMILARITIES, any_rank, any_score, cosine, per_head, sortable


def score(
    key: Tensor, *, occupied: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine"
) -> Tensor:
    """The dissimilarity of each key to the anchor of its KV head (KeyDiff eq. 8): [B, Hkv, S] float32, higher = keep.

    key [B, Hkv, S, D], any strides; occupied [B, S] or [B, Hkv, S] bool, by default all. Unoccupied slots are -inf.
    float32, float16, bfloat16, torch.float8_e4m3fn or torch.float8_e5m2; D from 16 to 256. A positive scale of FP8 keys
    changes no cosine, and other similarities are refused. Semantics: `kvtwin.reference.keydiff.score`.
    TypeError or ValueError for invalid arguments, for inputs that require grad, and for CPU tensors outside Triton's
    interpreter.
    """
    _check_keys(key, occupied)
    check_options(key, anchor, similarity)
    if (anchor, similarity) != DEFAULT:
        return any_score(key, per_head(occupied, key), anchor, similarity)
    key, _, fp8 = fp8_codes(key, key)
    direction, inverse = _ops.anchor(key, None, occupied, fp8)
    return cosine(_ops.rank(key, None, occupied, direction, inverse, fp8), direction, occupied)


def pairwise_score(key: Tensor, *, occupied: Tensor | None = None) -> Tensor:
    """-sum_j CosSim(k_i, k_j) over the occupied slots (eq. 7): [B, Hkv, S]. O(S), since the keys are summed first.

    Arguments as in `score`. Semantics: `kvtwin.reference.keydiff.pairwise_score`.
    """
    _check_keys(key, occupied)
    key, _, fp8 = fp8_codes(key, key)
    rank: Tensor = _ops.rank(key, None, occupied, *_ops.anchor(key, None, occupied, fp8), fp8)
    return rank


def evict(
    key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None, recent: int = 0,
    protected: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
) -> EvictResult:
    """Keep the `budget` tokens with the highest scores in each KV head; ties evict the lowest slot.

    key, value [B, Hkv, S, D], any strides, both FP8 or neither; occupied, protected [B, S] or [B, Hkv, S] bool, by
    default all and none. Semantics: `kvtwin.reference.keydiff.evict`. If `protected` is given, checking that
    `protected` and `recent` fit the budget synchronizes with the GPU. This check is skipped during CUDA graph capture
    and torch.compile, where the lowest of these slots are evicted. Nothing else synchronizes.
    """
    check_key_value(key, value, stored=FP8)
    check_counts(budget, recent)
    _check_keys(key, occupied)
    check_launchable(FP8, value=value)
    check_options(key, anchor, similarity)
    if protected is not None:
        _check_slots("protected", protected, key)
    all_protected = must_stay(key, occupied, recent, protected, budget)
    own = (anchor, similarity) == DEFAULT
    key_codes, value_codes, fp8 = fp8_codes(key, value)
    if own:
        code, histograms = _ops.codes(key_codes, None, occupied, all_protected, fp8)
    else:
        code = any_codes(key, per_head(occupied, key), all_protected, anchor, similarity)
        histograms = code.new_zeros((*code.shape[:2], 4, 256))
    kept_key, kept_value, *kept = select(key_codes, value_codes, code, histograms, min(budget, key.shape[2]), own)
    return EvictResult(kept_key.view(key.dtype), kept_value.view(key.dtype), *kept)


# Arguments -----------------------------------------------------------------------------------------------------------


def _check_keys(key: object, occupied: object) -> None:
    """Check key [B, Hkv, S, D] for a kernel, and occupied, None or [B, S] or [B, Hkv, S] bool."""
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, S, D]")
    check_dtype("key.dtype", key.dtype, FLOATING + FP8)
    check_launchable(FP8, key=key)
    check_kernel_sizes(_sizes(key))
    if occupied is not None:
        _check_slots("occupied", occupied, key)


def _check_slots(name: str, mask: object, key: Tensor) -> None:
    check_slot_mask(name, mask, _sizes(key), isinstance(mask, Tensor) and mask.dim() == 3, key)


def check_counts(budget: int, recent: int) -> None:
    check_integer("budget", budget, minimum=1)
    if check_integer("recent", recent, minimum=0) > budget:
        raise ValueError(f"recent must be at most budget = {budget}, got {recent}")


def check_options(key: Tensor, anchor: object, similarity: object) -> None:
    check_choice("anchor", anchor, ANCHORS)
    check_choice("similarity", similarity, SIMILARITIES)
    if key.dtype in FP8 and similarity != "cosine":
        raise ValueError(
            f"similarity must be 'cosine' for keys of {key.dtype}, whose scale others depend on, got {similarity!r}"
        )


def _sizes(key: Tensor) -> Sizes:
    batch, heads, slots, head_dim = key.shape
    return Sizes(batch, heads, heads, slots, head_dim)


def must_stay(
    like: Tensor, occupied: Tensor | None, recent: int, protected: Tensor | None, budget: int
) -> Tensor | None:
    """The tokens that must be kept, [B, Hkv, S] bool (may be True for unoccupied slots), or None. like [B, Hkv, S, ...]
    has the sizes."""
    slots = like.shape[2]
    all_protected = None if protected is None else per_head(protected, like)
    if recent:
        if occupied is None:
            last = (torch.arange(slots, device=like.device) >= slots - recent).expand(like.shape[:3])
        else:
            last = per_head(occupied.flip(-1).cumsum(-1).flip(-1) <= recent, like)
        all_protected = last if all_protected is None else all_protected | last
    if protected is not None and not torch.compiler.is_compiling() and not capturing(like.device):
        assert all_protected is not None
        most = int((all_protected & per_head(occupied, like)).sum(-1).max())
        if most > budget:
            raise ValueError(
                f"protected must mark at most budget = {budget} tokens per head, including the recent tokens, which "
                f"are always kept, got {most}"
            )
    return all_protected


def any_codes(key: Tensor, occupied: Tensor, all_protected: Tensor | None, anchor: str, similarity: str) -> Tensor:
    """As `_ops.codes`, for any anchor and similarity."""
    code = sortable(any_rank(key, occupied, anchor, similarity))
    if all_protected is not None:
        code = code.masked_fill(all_protected, 2**31 - 1)
    return code.masked_fill(~occupied, -(2**31))
