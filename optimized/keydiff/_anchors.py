"""KeyDiff's other anchors and similarities (Tables 2 and 3) in PyTorch operations. For ablations; not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.contract.scales import FP8

ANCHORS = ("mean_normalized", "mean", "median")
SIMILARITIES = ("cosine", "dot", "euclidean")
#: Eq. 8, which the kernels implement.
DEFAULT = ("mean_normalized", "cosine")


def any_score(key: Tensor, occupied: Tensor, anchor: str, similarity: str) -> Tensor:
    """The score for any anchor and similarity: key [B, Hkv, S, D], occupied [B, Hkv, S]; float32, -inf if
    unoccupied."""
    keys = _occupied_keys(key, occupied)
    if similarity == "cosine":
        direction = _direction(keys, occupied, anchor)                                  # [B, Hkv, D]
        result = over_length(-(direction[:, :, None] * _unit(keys)).sum(-1), direction)
    else:
        result = _measure(keys, occupied, anchor, similarity)
    return result.masked_fill(~occupied, -torch.inf)


def any_rank(key: Tensor, occupied: Tensor, anchor: str, similarity: str) -> Tensor:
    """The order of eviction: the score, but cosines are not divided by the anchor's length, which may be zero."""
    keys = _occupied_keys(key, occupied)
    if similarity != "cosine":
        return _measure(keys, occupied, anchor, similarity)
    return -(_direction(keys, occupied, anchor)[:, :, None] * _unit(keys)).sum(-1)


def over_length(product: Tensor, direction: Tensor) -> Tensor:
    """product [..., S] / ||direction [..., D]||; 0 where the direction is zero."""
    largest = direction.abs().amax(-1, keepdim=True)
    # Two divisions, because the inverse of a subnormal length overflows.
    scaled = direction / largest.masked_fill(largest == 0, 1)
    length = scaled.square().sum(-1, keepdim=True).sqrt().clamp_min(1)
    return product.masked_fill(largest == 0, 0) / largest.masked_fill(largest == 0, 1) / length


def cosine(rank: Tensor, direction: Tensor, occupied: Tensor | None) -> Tensor:
    """Turn ranks against a sum of normalized keys [B, Hkv, D] into cosines with it; 0 if the sum is zero."""
    result = over_length(rank, direction)
    return result if occupied is None else result.masked_fill(~per_head(occupied, rank[..., None]), -torch.inf)


def per_head(mask: Tensor | None, key: Tensor) -> Tensor:
    """A mask of key's slots as [B, Hkv, S], all True for None."""
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=key.device).expand(key.shape[:3])
    return (mask if mask.dim() == 3 else mask[:, None]).expand(key.shape[:3])


def sortable(rank: Tensor) -> Tensor:
    """float32 -> int32 in the same order; -0 equals 0, and NaN ranks as -inf."""
    bits = (rank.masked_fill(rank.isnan(), -torch.inf) + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _occupied_keys(key: Tensor, occupied: Tensor) -> Tensor:
    key = key.float() if key.dtype in FP8 else key
    # Contiguous, because with other strides equal keys may be summed in different orders.
    return torch.where(occupied[..., None], key, key.new_zeros(())).float().contiguous()


def _unit(vector: Tensor) -> Tensor:
    """Each vector [..., D] over its length. Divides by the largest element first, so that squares stay in range; zero
    vectors stay zero."""
    largest = vector.abs().amax(-1, keepdim=True)
    scaled = vector / largest.masked_fill(largest == 0, 1)
    # At least one element of a nonzero vector is 1.
    return scaled / scaled.square().sum(-1, keepdim=True).sqrt().clamp_min(1)


def _direction(keys: Tensor, occupied: Tensor, anchor: str) -> Tensor:
    """The anchor times a positive factor that keeps it in range, [B, Hkv, D]."""
    if anchor == "mean_normalized":
        return _unit(keys).sum(2)
    if anchor == "median":  # one of the numbers, which may be far smaller than the largest
        return _unit(_center(keys, occupied, anchor))
    largest = keys.abs().amax((2, 3), keepdim=True)
    return _center(keys / largest.masked_fill(largest == 0, 1), occupied, anchor)


def _center(keys: Tensor, occupied: Tensor, anchor: str) -> Tensor:
    """The anchor, [B, Hkv, D]."""
    count = occupied.sum(-1).clamp_min(1)[..., None]                                    # [B, Hkv, 1]
    if anchor == "median":
        ranked = keys.masked_fill(~occupied[..., None], torch.inf).sort(2).values
        middle = torch.div(count - 1, 2, rounding_mode="floor")                         # the lower one
        return torch.take_along_dim(ranked, middle[:, :, None], 2)[:, :, 0]
    return (_unit(keys) if anchor == "mean_normalized" else keys).sum(2) / count


def _measure(keys: Tensor, occupied: Tensor, anchor: str, similarity: str) -> Tensor:
    center = _center(keys, occupied, anchor)[:, :, None]
    if similarity == "dot":
        return -(center * keys).sum(-1)
    apart = keys - center
    largest = apart.abs().amax(-1)
    return largest * (apart / largest.masked_fill(largest == 0, 1)[..., None]).square().sum(-1).sqrt()
