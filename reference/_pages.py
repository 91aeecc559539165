"""Reading and writing the slots of caches in pages, [pages, page_size, Hkv, D]."""

from __future__ import annotations

import torch
from torch import Tensor


def read_slots(cache: Tensor, block_table: Tensor, slots: int) -> Tensor:
    """The first `slots` slots of all rows: [B, Hkv, slots, D]. A page of -1 is read as page 0."""
    size = cache.shape[1]
    used = block_table[:, :-(-slots // size)].long().clamp_min(0)
    return cache[used].flatten(1, 2)[:, :slots].transpose(1, 2)                 # [B, n, page_size, Hkv, D] before


def write_slots(cache: Tensor, block_table: Tensor, contents: Tensor) -> None:
    """Write contents [B, Hkv, N, D] into the first N slots of all rows."""
    slot = torch.arange(contents.shape[2], device=cache.device)
    page = block_table.long()[:, slot // cache.shape[1]]                                # [B, N]
    with torch.inference_mode(cache.is_inference()):                                    # `reorder` leaves that mode
        cache[page, slot % cache.shape[1]] = contents.transpose(1, 2)                   # [B, N, Hkv, D]
