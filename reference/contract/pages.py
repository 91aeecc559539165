"""Checks of caches in pages, for both sides. See `arguments` for the errors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Pages, Sizes
from .arguments import (
    FLOATING,
    check_device,
    check_dtype,
    check_indices,
    check_like,
    check_no_grad,
    check_shape,
    check_state_tensor,
    check_tensor,
    readable,
)
from .attention import check_heads, check_query_like, check_slot_mask


def check_pages(pages: object, stored: tuple[torch.dtype, ...] = ()) -> Pages:
    """Check everything but the entries of the block table, which are on the device. stored: see `check_attention`."""
    if not isinstance(pages, Pages):
        raise TypeError(f"pages must be Pages, got {type(pages).__name__}")
    layout = "[pages, page_size, Hkv, D]"
    key = check_tensor("pages.key_cache", pages.key_cache, dims=4, layout=layout)
    value = check_tensor("pages.value_cache", pages.value_cache, dims=4, layout=layout)
    table = check_tensor("pages.block_table", pages.block_table, dims=2, layout="[B, n]")
    check_dtype("pages.key_cache.dtype", key.dtype, FLOATING + stored)
    check_shape("pages.value_cache", value, tuple(key.shape), f"key_cache's {layout}")
    check_like("pages.value_cache", value, key, "key_cache")
    if table.dtype != torch.int32:
        raise TypeError(f"pages.block_table must be int32, got {table.dtype}")
    check_device("pages.block_table", table, key.device, "key_cache")
    return pages


def check_paged(
    query: object, pages: object, occupied: object, *, per_head: bool, check_entries: bool = False,
    stored: tuple[torch.dtype, ...] = (),
) -> tuple[Sizes, Pages]:
    """query [B, Hq, D], pages of B rows, and occupied [B, S] bool, or [B, Hkv, S] with per_head, with S slots in pages.
    The entries of a block table on a GPU are checked with check_entries only, which synchronizes with it. stored: see
    `check_attention`."""
    pages = check_pages(pages, stored)
    cache, table = pages.key_cache, pages.block_table
    query = check_tensor("query", query, dims=3, layout="[B, Hq, D]")
    if query.shape[0] != table.shape[0] or query.shape[2] != cache.shape[3]:
        raise ValueError(
            f"query must be [B, Hq, D] with block_table's B = {table.shape[0]} and key_cache's D = {cache.shape[3]}, "
            f"got {tuple(query.shape)}"
        )
    check_query_like("query", query, cache, "key_cache", stored)
    check_heads(query.shape[1], cache.shape[2])
    slots = _check_occupied(pages, occupied, per_head, check_entries)
    return Sizes(query.shape[0], query.shape[1], cache.shape[2], slots, query.shape[2]), pages


def check_paged_keys(
    pages: object, occupied: object, *, check_entries: bool = False, stored: tuple[torch.dtype, ...] = ()
) -> tuple[Sizes, Pages]:
    """As `check_paged` without a query: occupied [B, S] or [B, Hkv, S] bool. The sizes have Hq = Hkv."""
    pages = check_pages(pages, stored)
    per_head = isinstance(occupied, Tensor) and occupied.dim() == 3
    slots = _check_occupied(pages, occupied, per_head, check_entries)
    heads, head_dim = pages.key_cache.shape[2:]
    return Sizes(pages.block_table.shape[0], heads, heads, slots, head_dim), pages


def _check_occupied(pages: Pages, occupied: object, per_head: bool, check_entries: bool) -> int:
    """Check a mask of slots in pages and, if they may be read, the entries of the block table. Returns S."""
    cache, table = pages.key_cache, pages.block_table
    layout = "[B, Hkv, S]" if per_head else "[B, S]"
    mask = check_tensor("occupied", occupied, dims=3 if per_head else 2, layout=layout)
    slots, heads = mask.shape[-1], cache.shape[2]
    sizes = Sizes(table.shape[0], heads, heads, slots, cache.shape[3])
    check_slot_mask("occupied", occupied, sizes, per_head, cache, "key_cache")
    if slots > table.shape[1] * pages.page_size:
        raise ValueError(
            f"occupied must be {layout} with S <= {table.shape[1] * pages.page_size}, the slots of "
            f"{table.shape[1]} pages of {pages.page_size}, got {tuple(mask.shape)}"
        )
    if check_entries or table.device.type == "cpu":
        _check_entries(pages, mask)
    return slots


def _check_entries(pages: Pages, occupied: Tensor) -> None:
    """The pages of occupied slots, [B, S] or [B, Hkv, S], are pages of the cache. Reads both (one synchronization)."""
    if not readable(pages.block_table):
        return
    size, slots = pages.page_size, occupied.shape[-1]
    used = pages.block_table[:, :-(-slots // size)]
    check_indices("pages.block_table", used, pages.key_cache.shape[0])
    any_head = occupied if occupied.dim() == 2 else occupied.any(1)
    held = torch.nn.functional.pad(any_head, (0, -slots % size)).unflatten(1, (-1, size)).any(2)
    if bool((held & (used < 0)).any()):
        row, column = (held & (used < 0)).nonzero()[0].tolist()
        raise ValueError(
            f"pages.block_table must have a page for each occupied slot, got -1 in row {row}, column {column}"
        )


def check_own_pages(pages: object, *, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pages:
    """Pages for a state that writes to them: enough of them, in the cache, each for one row. Reads the block table."""
    pages = check_pages(pages)
    cache, table = pages.key_cache, pages.block_table
    check_state_tensor("pages.key_cache", cache, dtype, device)
    if tuple(cache.shape[2:]) != (sizes.key_value_heads, sizes.head_dim):
        raise ValueError(
            f"pages.key_cache must be [pages, page_size, Hkv, D] with the state's Hkv = {sizes.key_value_heads} and "
            f"D = {sizes.head_dim}, got {tuple(cache.shape)}"
        )
    for name, tensor in (("key_cache", pages.key_cache), ("value_cache", pages.value_cache)):
        check_no_grad(**{f"pages.{name}": tensor})
        if _overlaps(tensor):
            raise ValueError(f"pages.{name} must have memory for each element, got strides {tensor.stride()}")
    if pages.key_cache.data_ptr() == pages.value_cache.data_ptr():
        raise ValueError("pages.value_cache must have memory of its own, got that of key_cache")
    needed = -(-sizes.slots // pages.page_size)
    if table.shape[0] != sizes.batch or table.shape[1] < needed:
        raise ValueError(
            f"pages.block_table must be [B, n] with B = {sizes.batch} and n >= {needed} for {sizes.slots} slots in "
            f"pages of {pages.page_size}, got {tuple(table.shape)}"
        )
    used, available = table[:, :needed], cache.shape[0]
    if bool(((used < 0) | (used >= available)).any()):
        raise ValueError(
            f"pages.block_table must have pages from 0 to {available - 1} in its first {needed} columns, got "
            f"{used.min().item()} to {used.max().item()}"
        )
    if len(used.unique()) < used.numel():
        raise ValueError("pages.block_table must have a page for one row only, got a page in two places")
    return pages


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor may share memory: a step along an axis does not pass all of the axes below it."""
    axes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    end = 1
    for stride, size in axes:
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return False
