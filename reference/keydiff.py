"""KeyDiff: evict the keys that are most similar to the other keys, without computing attention weights.

Paper: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments". The score of token i in a KV head (eq. 8) is s_i = -CosSim(mu, k_i), where mu is the mean of the
normalized keys. Keys are post-RoPE, as in the cache. Tables 2 and 3 compare other anchors mu and other similarities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._fp8 import dequantized
from ._pages import read_slots, write_slots
from .attention import INF, accumulate_dtype, per_kv_head, zero_unoccupied
from .blocks import BlockConfig, BlockState, Chunk
from .contract import Pages, Sizes
from .contract.arguments import FLOATING, capturing, check_choice, check_dtype, check_flag, check_integer, check_tensor
from .contract.attention import check_key_value, check_slot_mask
from .contract.pages import check_own_pages, check_paged_keys
from .contract.scales import FP8
from .selection import gather_tokens, kept_tokens, order

__all__ = [
    "EvictResult", "KeyDiffConfig", "KeyDiffState", "PagedEvictResult", "Pages", "evict", "paged_evict", "paged_score",
    "pairwise_score", "score",
]

ANCHORS = ("mean_normalized", "mean", "median")
SIMILARITIES = ("cosine", "dot", "euclidean")


class EvictResult(NamedTuple):
    """The tokens that remain after an eviction, N = min(budget, S) per KV head.

    key, value: [B, Hkv, N, D], zero where kept is -1. kept: [B, Hkv, N] int64, the slots of the kept tokens, ascending,
    -1 at the end of KV heads with fewer tokens. occupied: [B, Hkv, N] bool, kept >= 0.
    """

    key: Tensor
    value: Tensor
    kept: Tensor
    occupied: Tensor


class PagedEvictResult(NamedTuple):
    """The tokens that remain in pages after an eviction, which moves none of them.

    kept: [B, Hkv, N] int64 with N = min(budget, S), the slots of the kept tokens, ascending, -1 at the end of KV heads
    with fewer tokens. occupied: [B, Hkv, S] bool, the slots of the kept tokens; the other slots are free. slot:
    [B, Hkv] int64, the lowest free slot, for the next token; -1 if there is none.
    """

    kept: Tensor
    occupied: Tensor
    slot: Tensor


@dataclass(frozen=True)
class KeyDiffConfig(BlockConfig):
    """Configuration of a KeyDiff cache.

    budget, block_size: see `BlockConfig`. recent: the number of newest tokens that are protected (Table 11), from 0 to
    budget. anchor, similarity: see `score`.
    refresh: an implementation may update the sum of the normalized keys incrementally from step to step (add the new
    key, subtract the evicted one). It must recompute the sum at each block of several tokens and at least every
    `refresh` steps, an int >= 1. The reference recomputes it at every step.
    Raises TypeError or ValueError for invalid arguments.
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
    """The dissimilarity of each key to the anchor of its KV head (eq. 8): [B, Hkv, S], higher = keep.

    key [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool, by default all. Returns float32 (float64 for float64
    inputs), -inf for unoccupied slots.
    anchor: "mean_normalized", the mean of k_i / ||k_i|| (eq. 8); "mean", the mean of k_i; "median", the median of k_i
    per channel, the lower one of an even number of keys. similarity: "cosine", -cos(mu, k_i); "dot", -mu . k_i;
    "euclidean", ||k_i - mu||. A zero key normalizes to zero, and the cosine with a zero key or a zero anchor is 0. Keys
    are divided by their largest magnitude before they are squared, so cosines neither overflow nor underflow. TypeError
    or ValueError for invalid arguments.
    key may be FP8: torch.float8_e4m3fn or torch.float8_e5m2. There is no argument for a scale, since no cosine depends
    on a positive scale of all keys of a KV head, whatever the anchor. Other similarities do: ValueError.
    """
    occupied = check_keys(key, occupied)
    check_options(key, anchor, similarity)
    return score_and_rank(key, occupied, anchor, similarity)[0]


def pairwise_score(key: Tensor, *, occupied: Tensor | None = None) -> Tensor:
    """-sum_j CosSim(k_i, k_j) over the occupied slots, token i included (eq. 7): [B, Hkv, S]. Takes O(S^2) memory.

    Arguments and errors as in `score`. It equals -S mu(K^) . k^_i, so it ranks tokens as eq. 8 does.
    """
    occupied = check_keys(key, occupied)
    unit = normalized(occupied_keys(key, occupied))
    cosine = (unit[:, :, :, None] * unit[:, :, None]).sum(-1)                           # [B, Hkv, S, S]
    return -cosine.sum(-1).masked_fill(~occupied, INF)


def evict(
    key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None, recent: int = 0,
    protected: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
) -> EvictResult:
    """Keep the `budget` tokens with the highest scores in each KV head (eq. 7, 8); ties evict the lowest slot.

    key, value [B, Hkv, S, D]; occupied, protected [B, S] or [B, Hkv, S] bool, by default all and none; budget an int
    >= 1; recent an int from 0 to budget; anchor, similarity as in `score`.
    Protected tokens and the `recent` newest tokens (the highest occupied slots) are kept. ValueError if they exceed the
    budget in a KV head; this check reads `protected` once and is skipped during CUDA graph capture and torch.compile,
    where the lowest of these slots are evicted. Tokens are ordered by `rank`; non-finite keys have a rank of NaN and
    are evicted first. TypeError or ValueError for invalid arguments.
    key and value may both be FP8, and the kept ones have the same codes. Scales are neither needed nor changed: see
    `score`.
    """
    check_key_value(key, value, stored=FP8)
    check_integer("budget", budget, minimum=1)
    check_recent(recent, budget)
    occupied = check_keys(key, occupied)
    check_options(key, anchor, similarity)
    later = occupied.flip(-1).cumsum(-1).flip(-1)                                       # tokens from this slot on
    keep = occupied & (later <= recent)
    if protected is not None:
        keep = keep | (check_mask_of("protected", protected, key) & occupied)
        check_protected_fit(keep, budget)

    slots = key.shape[2]
    code = order(rank(key, occupied, anchor, similarity))
    code = torch.where(keep, slots + torch.arange(slots, device=key.device), code)      # evicted last
    code = torch.where(occupied, code, code - 2 * slots)                                # below all tokens
    kept = kept_tokens(code, occupied, min(budget, slots))                              # [B, Hkv, N]
    return EvictResult(gather_tokens(key, kept), gather_tokens(value, kept), kept, kept >= 0)


def paged_score(
    pages: Pages, occupied: Tensor, *, anchor: str = "mean_normalized", similarity: str = "cosine",
    check_entries: bool = False,
) -> Tensor:
    """`score` of the keys in pages, FP8 or not, which rows may share: [B, Hkv, S]. Values are not read.

    occupied [B, S] or [B, Hkv, S] bool, with S up to the slots of the block table's pages. Pages of the block table are
    checked if it is on the CPU, or with check_entries=True. Other arguments and errors as in `score`.
    """
    check_flag("check_entries", check_entries)
    sizes, pages = check_paged_keys(pages, occupied, check_entries=check_entries, stored=FP8)
    key = read_slots(pages.key_cache, pages.block_table, sizes.slots)                   # [B, Hkv, S, D]
    return score(key, occupied=occupied, anchor=anchor, similarity=similarity)


def paged_evict(
    pages: Pages, occupied: Tensor, budget: int, *, recent: int = 0, protected: Tensor | None = None,
    anchor: str = "mean_normalized", similarity: str = "cosine", check_entries: bool = False,
) -> PagedEvictResult:
    """`evict` from pages, which rows may share: it frees slots, and moves and copies no token.

    occupied, protected [B, S] or [B, Hkv, S] bool, with S up to the slots of the block table's pages; protected is by
    default none. Each KV head has slots of its own. Pages of the block table are checked if it is on the CPU, or with
    check_entries=True. Other arguments and errors as in `evict`.
    """
    check_flag("check_entries", check_entries)
    sizes, pages = check_paged_keys(pages, occupied, check_entries=check_entries, stored=FP8)
    key = read_slots(pages.key_cache, pages.block_table, sizes.slots)                   # [B, Hkv, S, D]
    kept = evict(
        key, key, budget, occupied=occupied, recent=recent, protected=protected, anchor=anchor, similarity=similarity
    ).kept                                                                              # [B, Hkv, N]
    return PagedEvictResult(kept, *_slots_after(kept, sizes.slots))


def _slots_after(kept: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The slots [B, Hkv, S] that `kept` lists, and the lowest other slot [B, Hkv], -1 if there is none."""
    occupied = torch.zeros(*kept.shape[:2], slots + 1, dtype=torch.bool, device=kept.device)
    occupied = occupied.scatter(-1, kept.where(kept >= 0, slots), True)[..., :slots]
    free = torch.arange(slots, device=kept.device).where(~occupied, slots).amin(-1)
    return occupied, free.where(free < slots, -1)


def score_and_rank(key: Tensor, occupied: Tensor, anchor: str, similarity: str) -> tuple[Tensor, Tensor]:
    """`score` and `rank` of keys, both [B, Hkv, S]. occupied [B, Hkv, S]."""
    keys = occupied_keys(key, occupied)
    if similarity == "cosine":
        unit = normalized(keys)
        toward = unit.sum(2, keepdim=True) if anchor == "mean_normalized" else direction(keys, occupied, anchor)
        similar = -(normalized(toward) * unit).sum(-1)                                  # eq. 8
        return similar.masked_fill(~occupied, -INF), -(toward * unit).sum(-1)           # eq. 10
    if similarity == "dot":
        similar = -(center(keys, occupied, anchor) * keys).sum(-1)                      # Table 3
    else:
        scaled, largest = scaled_down(keys - center(keys, occupied, anchor))            # Table 3
        similar = (largest * length(scaled))[..., 0]
    similar = similar.masked_fill(~occupied, -INF)
    return similar, similar


def rank(key: Tensor, occupied: Tensor, anchor: str, similarity: str) -> Tensor:
    """The order of eviction, lowest rank first: [B, Hkv, S]. The ranks of unoccupied slots are unspecified.

    The cosine similarity uses -k^_i . sum_j k^_j (or a positive multiple of another anchor instead of the sum): eq. 8
    without its divisions. They do not change the order and are undefined for a zero anchor, for which all ranks are 0.
    """
    return score_and_rank(key, occupied, anchor, similarity)[1]


# Keys and anchors ----------------------------------------------------------------------------------------------------


def occupied_keys(key: Tensor, occupied: Tensor) -> Tensor:
    """key [B, Hkv, S, D] in accumulate_dtype, zero where unoccupied, contiguous so that equal keys have equal sums."""
    dtype = accumulate_dtype(key)
    return zero_unoccupied(dequantized(key, None, dtype), occupied).to(dtype).contiguous()


def scaled_down(vector: Tensor) -> tuple[Tensor, Tensor]:
    """vector [..., D] divided by its largest magnitude, and that magnitude [..., 1]; a zero vector is unchanged.

    The squares of the result sum to at least 1 and at most D, or to 0.
    """
    largest = vector.abs().amax(-1, keepdim=True)
    return vector / largest.masked_fill(largest == 0, 1), largest


def length(vector: Tensor) -> Tensor:
    """The Euclidean norm of vector [..., D]: [..., 1]."""
    return vector.square().sum(-1, keepdim=True).sqrt()


def normalized(vector: Tensor) -> Tensor:
    """k^ = k / ||k||: [..., D] -> [..., D], 0 for a zero vector."""
    scaled, _ = scaled_down(vector)
    return scaled / length(scaled).clamp_min(1)


def center(keys: Tensor, occupied: Tensor, anchor: str) -> Tensor:
    """The anchor mu, [B, Hkv, 1, D]: keys from `occupied_keys`, occupied [B, Hkv, S] bool."""
    count = occupied.sum(-1).clamp_min(1)[..., None, None]                              # [B, Hkv, 1, 1]
    if anchor == "median":
        ascending = keys.masked_fill(~occupied[..., None], INF).sort(2).values
        return ascending.gather(2, ((count - 1) // 2).expand(*count.shape[:3], keys.shape[-1]))
    return (normalized(keys) if anchor == "mean_normalized" else keys).sum(2, keepdim=True) / count


def direction(keys: Tensor, occupied: Tensor, anchor: str) -> Tensor:
    """A positive multiple of the anchor that neither overflows nor underflows, [B, Hkv, 1, D].

    "mean_normalized": sum_j k^_j. "median": the median divided by its largest magnitude. "mean": the mean of the keys
    after division by the largest magnitude in the KV head.
    """
    if anchor == "mean_normalized":
        return normalized(keys).sum(2, keepdim=True)
    if anchor == "median":
        return scaled_down(center(keys, occupied, anchor))[0]
    scaled, _ = scaled_down(keys.flatten(2))
    return center(scaled.view(keys.shape), occupied, anchor)


# Arguments -----------------------------------------------------------------------------------------------------------


def check_keys(key: object, occupied: object) -> Tensor:
    """Check key [B, Hkv, S, D] and occupied, which is as in `score`. Returns occupied as [B, Hkv, S]."""
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, S, D]")
    check_dtype("key.dtype", key.dtype, FLOATING + FP8)
    if occupied is None:
        return torch.ones(key.shape[:3], dtype=torch.bool, device=key.device)
    return check_mask_of("occupied", occupied, key)


def check_options(key: Tensor, anchor: str, similarity: str) -> None:
    """Check the options of `score`. FP8 keys, whose scale is not known, have a cosine, but no other similarity."""
    check_choice("anchor", anchor, ANCHORS)
    check_choice("similarity", similarity, SIMILARITIES)
    if key.dtype in FP8 and similarity != "cosine":
        raise ValueError(
            f"similarity must be 'cosine' for keys of {key.dtype}, whose scale others depend on, got {similarity!r}"
        )


def check_mask_of(name: str, mask: object, key: Tensor) -> Tensor:
    """Check a mask [B, S] or [B, Hkv, S] of key's slots. Returns it as [B, Hkv, S]."""
    batch, heads, slots, head_dim = key.shape
    per_head = isinstance(mask, Tensor) and mask.dim() == 3
    check_slot_mask(name, mask, Sizes(batch, heads, heads, slots, head_dim), per_head, key)
    assert isinstance(mask, Tensor)
    return per_kv_head(mask).expand(batch, heads, slots)


def check_recent(recent: object, budget: int) -> None:
    if check_integer("recent", recent, minimum=0) > budget:
        raise ValueError(f"recent must be at most budget = {budget}, got {recent}")


def check_protected_fit(keep: Tensor, budget: int) -> None:
    """ValueError if a KV head must keep more than `budget` tokens: keep [B, Hkv, S] bool. Reads the mask."""
    if capturing(keep.device) or torch.compiler.is_compiling():
        return
    most = int(keep.sum(-1).max())
    if most > budget:
        raise ValueError(
            f"protected must mark at most budget = {budget} tokens per head, including the recent tokens, which are "
            f"always kept, got {most}"
        )


class KeyDiffState(BlockState):
    """A KeyDiff cache, see `BlockState`. `score` holds the scores from before the last eviction, which move with their
    tokens. The anchor is recomputed at every block and step.

    pages: between calls, the state holds its tokens there, in the pages that the block table lists, and `key` and
    `value` are copies. A row needs pages for budget + 1 slots: the token of a step takes slot `budget`, and moves to
    the slot that a token leaves. No two rows, and no two states, may have the same page. Pages may be moved between two
    calls, with the block table changed in place. ValueError for too few pages, a page of two rows, caches that overlap,
    and caches with another number of KV heads or another head_dim.
    """

    Config = KeyDiffConfig

    def __init__(
        self, config: KeyDiffConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, sink_logits: Tensor | None = None, pages: Pages | None = None,
    ) -> None:
        super().__init__(
            config, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, head_dim=head_dim,
            dtype=dtype, device=device, sink_logits=sink_logits,
        )
        if pages is not None:
            sizes = self.sizes._replace(slots=config.budget + 1)
            check_own_pages(pages, sizes=sizes, dtype=self.dtype, device=self.device)
        self._pages = pages

    @property
    def pages(self) -> Pages | None:
        return self._pages

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """As of `BlockState`."""
        with self._from_pages():
            return super().append_block(query, key, value, occupied)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As of `BlockState`."""
        with self._from_pages():
            return super().step(query, key, value)

    def _take(self, source: Any, index: Tensor) -> None:
        with self._from_pages(), nullcontext() if source is self else source._from_pages():
            super()._take(source, index)

    def _adopt(self, positions: Tensor) -> None:
        with self._from_pages():
            super()._adopt(positions)

    @contextmanager
    def _from_pages(self) -> Iterator[None]:
        """A context in which `key` and `value` have the tokens, which are then written to the pages."""
        if self._pages is None:
            yield
            return
        budget, table = self.config.budget, self._pages.block_table
        for tensor, cache in ((self.key, self._pages.key_cache), (self.value, self._pages.value_cache)):
            tensor[:, :, :budget] = read_slots(cache, table, budget)
        yield
        for tensor, cache in ((self.key, self._pages.key_cache), (self.value, self._pages.value_cache)):
            write_slots(cache, table, tensor[:, :, :budget])

    def _observe(self, chunk: Chunk) -> None:
        found, self._order = score_and_rank(self.key, self.occupied, self.config.anchor, self.config.similarity)
        self.score.copy_(found)

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self._order, self._newest(self.config.recent)
