"""KeyDiff's functions over pages: the kernels find each key by the block table, and nothing is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.contract import Pages, Sizes
from ...reference.contract.arguments import check_flag
from ...reference.contract.attention import check_slot_mask
from ...reference.contract.pages import check_paged_keys
from ...reference.contract.scales import FP8
from ...reference.keydiff import PagedEvictResult
from .._common.launch import check_kernel_sizes, check_launchable, fp8_codes
from .._common.pages import by_head, read_slots
from .._common.radix_selection import select_slots
from . import _ops
from ._anchors import DEFAULT, any_score, cosine, per_head
from .scores import any_codes, check_counts, check_options, must_stay


def paged_score(
    pages: Pages, occupied: Tensor, *, anchor: str = "mean_normalized", similarity: str = "cosine",
    check_entries: bool = False,
) -> Tensor:
    """`score` of the keys in pages, FP8 or not, which rows may share: [B, Hkv, S] float32. Values are not read.

    occupied [B, S] or [B, Hkv, S] bool, with S up to the slots of the block table's pages. Pages of the block table are
    checked if it is on the CPU, or with check_entries=True, which synchronizes with a GPU. Other arguments and errors
    as in `score`.
    """
    sizes, pages = _check(pages, occupied, check_entries)
    check_options(pages.key_cache, anchor, similarity)
    if (anchor, similarity) != DEFAULT:
        key = _slots_of(pages, sizes.slots)
        return any_score(key, per_head(occupied, key), anchor, similarity)
    key, _, fp8 = fp8_codes(by_head(pages.key_cache), by_head(pages.key_cache))
    direction, inverse = _ops.anchor(key, pages.block_table, occupied, fp8)
    rank = _ops.rank(key, pages.block_table, occupied, direction, inverse, fp8)
    return cosine(rank, direction, occupied)


def paged_evict(
    pages: Pages, occupied: Tensor, budget: int, *, recent: int = 0, protected: Tensor | None = None,
    anchor: str = "mean_normalized", similarity: str = "cosine", check_entries: bool = False,
) -> PagedEvictResult:
    """`evict` from pages, which rows may share: it frees slots, and moves and copies no token.

    occupied, protected [B, S] or [B, Hkv, S] bool, with S up to the slots of the block table's pages; protected is by
    default none. Each KV head has slots of its own. Pages of the block table are checked if it is on the CPU, or with
    check_entries=True, which synchronizes with a GPU. So does `protected`, as in `evict`. Other arguments and errors as
    there.
    """
    sizes, pages = _check(pages, occupied, check_entries)
    check_counts(budget, recent)
    check_options(pages.key_cache, anchor, similarity)
    if protected is not None:
        each_head = isinstance(protected, Tensor) and protected.dim() == 3
        check_slot_mask("protected", protected, sizes, each_head, pages.key_cache, "key_cache")
    masks = (occupied if occupied.dim() == 3 else occupied[:, None]).expand(-1, sizes.key_value_heads, -1)
    all_protected = must_stay(masks, occupied, recent, protected, budget)
    own = (anchor, similarity) == DEFAULT
    if own:
        key, _, fp8 = fp8_codes(by_head(pages.key_cache), by_head(pages.key_cache))
        code, histograms = _ops.codes(key, pages.block_table, occupied, all_protected, fp8)
    else:
        key = _slots_of(pages, sizes.slots)
        code = any_codes(key, masks, all_protected, anchor, similarity)
        histograms = code.new_zeros((*code.shape[:2], 4, 256))
    kept = select_slots(code, histograms, min(budget, sizes.slots), own)
    return PagedEvictResult(kept, *_slots_after(kept, sizes.slots))


def _check(pages: object, occupied: object, check_entries: object) -> tuple[Sizes, Pages]:
    flag = check_flag("check_entries", check_entries)
    sizes, pages = check_paged_keys(pages, occupied, check_entries=flag, stored=FP8)
    check_launchable(FP8, key_cache=pages.key_cache)
    check_kernel_sizes(sizes)
    return sizes, pages


def _slots_of(pages: Pages, slots: int) -> Tensor:
    """The keys in the slots of all rows, [B, Hkv, S, D]."""
    cache, _, _ = fp8_codes(pages.key_cache, pages.key_cache)
    return read_slots(cache, pages.block_table, slots).view(pages.key_cache.dtype)


def _slots_after(kept: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The slots [B, Hkv, S] that `kept` lists, and the lowest other slot [B, Hkv], -1 if there is none."""
    occupied = torch.zeros(*kept.shape[:2], slots + 1, dtype=torch.bool, device=kept.device)
    occupied = occupied.scatter_(-1, kept % (slots + 1), True)[..., :slots]             # -1 becomes S
    free = torch.arange(slots, device=kept.device).where(~occupied, slots).amin(-1)
    return occupied, free.where(free < slots, -1)
