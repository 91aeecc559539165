"""KeyDiff: evict the keys that point where most keys point, without looking at any attention weight.

Paper: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments". Score of token i (eq. 8): s_i = -CosSim(mu, k_i), mu the mean of the normalised keys, for each KV head;
keys are those of the cache (after RoPE). Tables 2 and 3 compare other anchors mu and other similarities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import INF, accumulate_dtype, per_kv_head, zero_unoccupied
from .baselines.snapkv import gather_tokens
from .blocks import BlockConfig, BlockState, Piece, order
from .contract import (
    Sizes, capturing, check_choice, check_dtype, check_integer, check_key_value, check_slot_mask, check_tensor,
)
from .selection import kept_after

__all__ = ["EvictResult", "KeyDiffConfig", "KeyDiffState", "evict", "pairwise_score", "score"]

ANCHORS = ("mean_normalized", "mean", "median")
SIMILARITIES = ("cosine", "dot", "euclidean")


class EvictResult(NamedTuple):
    """What an eviction left, N = min(budget, S) places per KV head.

    key, value: [B, Hkv, N, D], zero where nothing is kept. kept: [B, Hkv, N] int64, the slots that stay, ascending, -1
    at the end of heads that had fewer tokens. occupied: [B, Hkv, N] bool, kept >= 0.
    """

    key: Tensor
    value: Tensor
    kept: Tensor
    occupied: Tensor


@dataclass(frozen=True)
class KeyDiffConfig(BlockConfig):
    """How a KeyDiff cache evicts.

    budget, block_size: see `BlockConfig`. recent: that many newest tokens are protected (Table 11), 0 to budget.
    anchor, similarity: see `score`.
    refresh: an implementation may carry the sum of the normalised keys from decode step to decode step (add the new,
    subtract the evicted), if it sums them anew with each block of several tokens, and at least every `refresh` steps;
    an int >= 1. The reference always does.
    Raises TypeError or ValueError for anything else.
    """

    recent: int = 0
    anchor: str = "mean_normalized"
    similarity: str = "cosine"
    refresh: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_recent(self.recent, self.budget)
        check_choice("anchor", self.anchor, ANCHORS)
        check_choice("similarity", self.similarity, SIMILARITIES)
        check_integer("refresh", self.refresh, minimum=1)


def score(
    key: Tensor, *, occupied: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine"
) -> Tensor:
    """How far each key is from the anchor of its head, the dissimilarity of eq. 8: [B, Hkv, S], higher = keep.

    key [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool, default all. Float32 (float64 for float64); -inf where
    unoccupied.
    anchor: "mean_normalized", the mean of k_i / ||k_i|| (eq. 8); "mean", of k_i; "median", of k_i in each channel, the
    lower middle of an even number. similarity: "cosine", -cos(mu, k_i); "dot", -mu . k_i; "euclidean", ||k_i - mu||.
    A zero key has no direction: it normalises to zero, and its cosine with anything is 0; so it is with a zero anchor.
    Keys are divided by their largest magnitude before anything is squared: cosines are right for keys of any size.
    TypeError, ValueError for arguments that do not fit.
    """
    occupied = check_keys(key, occupied)
    check_choice("anchor", anchor, ANCHORS)
    check_choice("similarity", similarity, SIMILARITIES)
    keys = held_keys(key, occupied)
    if similarity == "cosine":
        mu = normalized(direction(keys, occupied, anchor))                              # [B, Hkv, 1, D]
        similar = -(mu * normalized(keys)).sum(-1)                                      # eq. 8
    elif similarity == "dot":
        similar = -(center(keys, occupied, anchor) * keys).sum(-1)                      # Table 3
    else:
        scaled, largest = scaled_down(keys - center(keys, occupied, anchor))            # Table 3
        similar = (largest * length(scaled))[..., 0]
    return similar.masked_fill(~occupied, -INF)


def pairwise_score(key: Tensor, *, occupied: Tensor | None = None) -> Tensor:
    """-sum_j CosSim(k_i, k_j) over the occupied slots, itself included (eq. 7): [B, Hkv, S], O(S^2).

    Arguments and result as in `score`. It is S times mu(K^) . k^_i, so it orders as eq. 8 does.
    """
    occupied = check_keys(key, occupied)
    unit = normalized(held_keys(key, occupied))
    cosine = (unit[:, :, :, None] * unit[:, :, None]).sum(-1)                           # [B, Hkv, S, S]
    return -cosine.sum(-1).masked_fill(~occupied, INF)


def evict(
    key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None, recent: int = 0,
    protected: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
) -> EvictResult:
    """Keep the `budget` tokens of each head that score highest (eq. 7, 8); ties: the lowest slot goes.

    key, value [B, Hkv, S, D]; occupied, protected [B, S] or [B, Hkv, S] bool, default all and none; budget an int >= 1.
    The `recent` newest tokens (highest slots) stay, and so do protected ones; both together may not outnumber the
    budget in any head: that is a ValueError, and reads `protected` once (neither while a CUDA graph captures nor while
    torch.compile traces: then the lowest slots of them go). Ordered by `rank`; non-finite keys make ranks of NaN, which
    go first. TypeError, ValueError for arguments that do not fit.
    """
    check_key_value(key, value)
    check_integer("budget", budget, minimum=1)
    check_recent(recent, budget)
    occupied = check_keys(key, occupied)
    check_choice("anchor", anchor, ANCHORS)
    check_choice("similarity", similarity, SIMILARITIES)
    later = occupied.flip(-1).cumsum(-1).flip(-1)                                       # itself and those after it
    shielded = occupied & (later <= recent)
    if protected is not None:
        shielded = shielded | (check_mask_of("protected", protected, key) & occupied)
        check_room(shielded, budget)

    slots = key.shape[2]
    code = order(rank(key, occupied, anchor, similarity))
    code = torch.where(shielded, slots + torch.arange(slots, device=key.device), code)  # shielded ones go last
    code = torch.where(occupied, code, code - 2 * slots)                                # empty ones first
    kept = kept_after(code, min(budget, slots))                                         # [B, Hkv, N]
    holds = occupied.gather(-1, kept)
    # Places without a token go to the end; the others keep their order.
    places = (~holds).to(torch.int8).sort(dim=-1, stable=True).indices
    kept = kept.masked_fill(~holds, -1).gather(-1, places)
    return EvictResult(gather_tokens(key, kept), gather_tokens(value, kept), kept, kept >= 0)


def rank(key: Tensor, occupied: Tensor, anchor: str, similarity: str) -> Tensor:
    """The order of eviction, lowest first: [B, Hkv, S]; of unoccupied slots it says nothing.

    For cosines -k^_i . sum_j k^_j (or any positive multiple of another anchor in the place of the sum): eq. 8 without
    its divisions, which do not change the order, and have no meaning where the anchor vanishes; here all ranks are 0.
    """
    if similarity != "cosine":
        return score(key, occupied=occupied, anchor=anchor, similarity=similarity)
    keys = held_keys(key, occupied)
    return -(direction(keys, occupied, anchor) * normalized(keys)).sum(-1)              # eq. 10


# Parts of these ------------------------------------------------------------------------------------------------------


def held_keys(key: Tensor, occupied: Tensor) -> Tensor:
    """key [B, Hkv, S, D] in accumulate_dtype, zero where unoccupied; dense, so that equal keys are summed alike."""
    return zero_unoccupied(key, occupied).to(accumulate_dtype(key)).contiguous()


def scaled_down(vector: Tensor) -> tuple[Tensor, Tensor]:
    """vector [..., D] divided by its largest magnitude [..., 1], and that; zeros stay. Their squares then sum to at
    least 1 and at most D, whatever the vector's size."""
    largest = vector.abs().amax(-1, keepdim=True)
    return vector / largest.masked_fill(largest == 0, 1), largest


def length(vector: Tensor) -> Tensor:
    """||vector||, [..., 1]."""
    return vector.square().sum(-1, keepdim=True).sqrt()


def normalized(vector: Tensor) -> Tensor:
    """k^ = k / ||k||, [..., D]; 0 for a zero vector."""
    scaled, _ = scaled_down(vector)
    return scaled / length(scaled).clamp_min(1)


def center(keys: Tensor, occupied: Tensor, anchor: str) -> Tensor:
    """The anchor mu, [B, Hkv, 1, D]. keys as `held_keys` gives them; occupied [B, Hkv, S]."""
    count = occupied.sum(-1).clamp_min(1)[..., None, None]                              # [B, Hkv, 1, 1]
    if anchor == "median":
        ascending = keys.masked_fill(~occupied[..., None], INF).sort(2).values
        return ascending.gather(2, ((count - 1) // 2).expand(*count.shape[:3], keys.shape[-1]))
    return (normalized(keys) if anchor == "mean_normalized" else keys).sum(2, keepdim=True) / count


def direction(keys: Tensor, occupied: Tensor, anchor: str) -> Tensor:
    """A positive multiple of the anchor that neither over- nor underflows, [B, Hkv, 1, D]: sum_j k^_j for
    "mean_normalized", the median divided by its largest magnitude, the mean of the keys divided by the largest
    magnitude in the head."""
    if anchor == "mean_normalized":
        return normalized(keys).sum(2, keepdim=True)
    if anchor == "median":
        return scaled_down(center(keys, occupied, anchor))[0]
    scaled, _ = scaled_down(keys.flatten(2))
    return center(scaled.view(keys.shape), occupied, anchor)


# Arguments -----------------------------------------------------------------------------------------------------------


def check_keys(key: object, occupied: object) -> Tensor:
    """key [B, Hkv, S, D]; occupied as in `score`. Returns occupied [B, Hkv, S]."""
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, S, D]")
    check_dtype("key.dtype", key.dtype)
    if occupied is None:
        return torch.ones(key.shape[:3], dtype=torch.bool, device=key.device)
    return check_mask_of("occupied", occupied, key)


def check_mask_of(name: str, mask: object, key: Tensor) -> Tensor:
    """A mask [B, S] or [B, Hkv, S] of key's slots, as [B, Hkv, S]."""
    batch, heads, slots, head_dim = key.shape
    per_head = isinstance(mask, Tensor) and mask.dim() == 3
    check_slot_mask(name, mask, Sizes(batch, heads, heads, slots, head_dim), per_head, key)
    assert isinstance(mask, Tensor)
    return per_kv_head(mask).expand(batch, heads, slots)


def check_recent(recent: object, budget: int) -> None:
    if check_integer("recent", recent, minimum=0) > budget:
        raise ValueError(f"recent must be at most budget = {budget}, got {recent}")


def check_room(shielded: Tensor, budget: int) -> None:
    """Reads the mask, one synchronisation."""
    if capturing(shielded.device) or torch.compiler.is_compiling():
        return
    most = int(shielded.sum(-1).max())
    if most > budget:
        raise ValueError(
            f"protected must leave, with the recent tokens, at most budget = {budget} tokens per head that stay in any "
            f"case, got {most}"
        )


class KeyDiffState(BlockState):
    """A KeyDiff cache. `score` is `score` of the tokens held before the last eviction, and moves with its token. The
    anchor is computed anew at every block and step."""

    Config = KeyDiffConfig

    def _observe(self, piece: Piece) -> None:
        self.score.copy_(score(self.key, occupied=self.occupied, **self._options))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return rank(self.key, self.occupied, **self._options), self._newest(self.config.recent)

    @property
    def _options(self) -> dict[str, str]:
        return {"anchor": self.config.anchor, "similarity": self.config.similarity}
