"""States whose tokens lie in pages of a cache, for tests that run any trace on them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...reference.contract import Pages
from .paged_view import LAYOUTS, PagedLayout

#: Pages of a state belong to one row, so that no layout shares them. Pages of 5 are no power of two.
OWN_LAYOUTS = (*(layout for layout in LAYOUTS if not layout.shared), PagedLayout(5, "heads_first", joined=True, seed=2))


def empty_pages(
    layout: PagedLayout, *, batch: int, slots: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
    device: torch.device | str,
) -> Pages:
    """Pages for `slots` slots of each row, and `spare` ones that no row has. All memory holds NaN."""
    size, each = layout.page_size, -(-slots // layout.page_size)
    count = batch * each + layout.spare
    shape = (size, key_value_heads, head_dim) if layout.order == "tokens_first" else (key_value_heads, size, head_dim)
    room = (2 * count if layout.apart else count, *((2,) if layout.joined else ()), *shape)
    made = [
        torch.full(room, math.nan, dtype=dtype, device=device)[::2 if layout.apart else 1]
        for _ in range(1 if layout.joined else 2)
    ]
    key, value = (made[0][:, 0], made[0][:, 1]) if layout.joined else made
    if layout.order == "heads_first":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(layout.seed))
    table = order[:batch * each].view(batch, each).int().to(device)
    return Pages(key, value, table)


def filled_pages(layout: PagedLayout, key: Tensor, value: Tensor) -> Pages:
    """Pages with the tokens of key, value [B, Hkv, S, D]. All other memory holds NaN."""
    batch, heads, slots, head_dim = key.shape
    pages = empty_pages(
        layout, batch=batch, slots=slots, key_value_heads=heads, head_dim=head_dim, dtype=key.dtype, device=key.device
    )
    for row, entries in enumerate(pages.block_table.tolist()):
        for slot in range(slots):
            place = entries[slot // layout.page_size], slot % layout.page_size
            pages.key_cache[place], pages.value_cache[place] = key[row, :, slot], value[row, :, slot]
    return pages


def module_of(method: Any, state: str, layout: PagedLayout, *, more: int = 0) -> Any:
    """A stand-in for a method's module, whose states get pages of their own, for `more` slots than the budget. `made`
    lists them."""
    real, made = getattr(method, state), []

    def construct(config: Any, *, batch: int, key_value_heads: int, head_dim: int, **options: Any) -> Any:
        sizes = {"batch": batch, "key_value_heads": key_value_heads, "head_dim": head_dim}
        slots = config.budget + more
        pages = empty_pages(layout, slots=slots, **sizes, dtype=options["dtype"], device=options["device"])
        made.append(real(config, **sizes, **options, pages=pages))
        return made[-1]

    return SimpleNamespace(**{state: construct}, made=made)


def strided_pages(
    page_size: int, *, batch: int, slots: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
    device: torch.device | str,
) -> Pages:
    """Pages whose keys, values and table have strides of their own, with memory between values and further columns of
    the table."""
    sizes: dict[str, Any] = {
        "batch": batch, "slots": slots, "key_value_heads": key_value_heads, "head_dim": head_dim, "dtype": dtype,
        "device": device,
    }
    key, _, table = empty_pages(PagedLayout(page_size), **sizes)
    value = empty_pages(PagedLayout(page_size, "heads_first", apart=True), **sizes).value_cache
    wide = torch.cat((table, torch.full_like(table, -1)), 1)
    return Pages(key.transpose(1, 3).contiguous().transpose(1, 3), value, wide.t().contiguous().t())


def in_strided_pages(method: Any, state: str, page_size: int) -> Any:
    """A stand-in for a method's module, whose states get `strided_pages` of their own, for a slot more than the budget.
    `made` lists them."""
    real, made = getattr(method, state), []

    def construct(config: Any, *, batch: int, key_value_heads: int, head_dim: int, **options: Any) -> Any:
        sizes = {"batch": batch, "key_value_heads": key_value_heads, "head_dim": head_dim}
        pages = strided_pages(
            page_size, slots=config.budget + 1, **sizes, dtype=options["dtype"], device=options["device"]
        )
        made.append(real(config, **sizes, **options, pages=pages))
        return made[-1]

    return SimpleNamespace(**{state: construct}, made=made)


def move(pages: Pages, seed: int) -> None:
    """Move every page to another place of the cache, and change the block table in place."""
    count = pages.key_cache.shape[0]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(pages.block_table.device)
    for cache in (pages.key_cache, pages.value_cache):
        cache[order] = cache.clone()
    pages.block_table.copy_(order[pages.block_table.long()].int())


def assert_only_own_slots_were_written(pages: Pages, slots: int) -> None:
    """All memory but the slots of the rows still holds NaN."""
    size = pages.page_size
    for cache in (pages.key_cache, pages.value_cache):
        own = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
        for entries in pages.block_table.long():
            slot = torch.arange(slots, device=cache.device)
            own[entries[slot // size], slot % size] = True
        assert bool(cache[~own].isnan().all()), "memory of other sequences was written"


def name_of(layout: PagedLayout) -> str:
    """The name of a layout in the names of tests."""
    return "-".join(map(str, (layout.page_size, layout.order, *(["apart"] if layout.apart else ()), layout.seed)))
