"""Caches in pages: the view that kernels take, and reading and writing of slots."""

from __future__ import annotations

import torch
from torch import Tensor


def by_head(cache: Tensor) -> Tensor:
    """A cache [pages, page_size, Hkv, D] as kernels take it: [pages, Hkv, page_size, D]."""
    return cache.transpose(1, 2)


def read_slots(cache: Tensor, block_table: Tensor, slots: int) -> Tensor:
    """The first `slots` slots of all rows of a cache [pages, page_size, Hkv, D]: a copy [B, Hkv, slots, D]. Slots of
    the page -1 are read from page 0."""
    page, place = _places(cache, block_table, slots)
    return cache[page.clamp_min(0), place].transpose(1, 2)


def write_slots(cache: Tensor, block_table: Tensor, contents: Tensor) -> None:
    """Write contents [B, Hkv, N, D] into the first N slots of all rows."""
    cache.index_put_(_places(cache, block_table, contents.shape[2]), contents.transpose(1, 2))


def _places(cache: Tensor, block_table: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The page and the place in it of the first slots of all rows, [B, slots] int64 each."""
    slot = torch.arange(slots, device=cache.device)
    page = block_table.index_select(1, slot // cache.shape[1]).long()
    return page, (slot % cache.shape[1]).expand_as(page)
