"""A case's keys and values in pages, as serving engines hold them.

`PagedView` lays a `DecodeCase` or a `KeyCase` out in pages of a cache that other sequences use, too. What the case's
slots hold does not change. So an implementation that takes pages is judged on the same cases, and its results must not
depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .case import DecodeCase
from .key_cases import KeyCase

ORDERS = ("tokens_first", "heads_first")


@dataclass(frozen=True)
class PagedLayout:
    """Where pages lie.

    page_size: tokens of a page. order: "tokens_first" for pages [page_size, Hkv, D], "heads_first" for [Hkv, page_size,
    D]. joined: keys and values are one tensor, [pages, 2, ...]. apart: other memory lies between two pages. shared:
    pages of several sequences with the same contents are one page. spare: pages that no sequence uses. seed: of the
    order of the pages. TypeError or ValueError for invalid arguments.
    """

    page_size: int = 16
    order: str = ORDERS[0]
    joined: bool = False
    apart: bool = False
    shared: bool = False
    spare: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("page_size", 1), ("spare", 0)):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")


#: Pages of 1, 16 and 64 tokens, both orders, joined and apart, shared, and two orders of the pages.
LAYOUTS = (
    PagedLayout(16),
    PagedLayout(16, seed=1),
    PagedLayout(16, "heads_first", apart=True),
    PagedLayout(1, joined=True),
    PagedLayout(64, "heads_first", joined=True, apart=True),
    PagedLayout(16, shared=True),
)


@dataclass(frozen=True)
class PagedView:
    """A DecodeCase with per_head=False, or a KeyCase, in pages. Unused memory holds NaN, also the free slots.

    query [B, Hq, D] and `scale`: of a DecodeCase. occupied [B, S] bool, or [B, Hkv, S] of a KeyCase with per_head, all
    True if the case has no mask; protected as in the case, or None. key_cache, value_cache [pages, page_size, Hkv, D]
    or [pages, Hkv, page_size, D]; cache: both as one tensor [pages, 2, ...] of a joined layout, else None. block_table
    [B, n] int32: the page of each page_size slots, -1 if all of them are free. lengths [B] int32: the number of slots
    up to the last occupied one. slot_mapping [B, S] int64: page * page_size + place of each slot, -1 if it is free in
    all KV heads. page_indptr [B + 1], page_indices, last_page_len [B] int32: the block table as FlashInfer has it,
    without what is behind `lengths`. Pages of free slots alone are page 0 there.
    """

    case: DecodeCase | KeyCase
    layout: PagedLayout = LAYOUTS[0]

    def __post_init__(self) -> None:
        if not isinstance(self.case, DecodeCase | KeyCase):
            raise TypeError(f"case must be a DecodeCase or a KeyCase, got {type(self.case).__name__}")
        if isinstance(self.case, DecodeCase) and self.case.occupied.dim() == 3:
            raise ValueError("case must have one occupied mask for all KV heads of a row (per_head=False)")

    @property
    def query(self) -> Tensor:
        return self.case.tensor("query")

    @cached_property
    def occupied(self) -> Tensor:
        mask = self.case.tensors["occupied"]
        if mask is None:
            return torch.ones(self.case.batch, self.case.slots, dtype=torch.bool, device=self.case.device)
        return mask

    @property
    def protected(self) -> Tensor | None:
        return self.case.protected

    @property
    def scale(self) -> float | None:
        return self.case.scale

    @cached_property
    def block_table(self) -> Tensor:
        return self._table[0]

    @cached_property
    def lengths(self) -> Tensor:
        slot = torch.arange(1, self._held.shape[1] + 1, device=self._held.device)
        return (slot * self._held).amax(1).int()

    @cached_property
    def slot_mapping(self) -> Tensor:
        size = self.layout.page_size
        slot = torch.arange(self._held.shape[1], device=self._held.device)
        page = self.block_table.long()[:, slot // size]
        return (page * size + slot % size).masked_fill(~self._held, -1)

    @cached_property
    def page_indptr(self) -> Tensor:
        return torch.nn.functional.pad(self._used_pages.cumsum(0), (1, 0)).int()

    @cached_property
    def page_indices(self) -> Tensor:
        entry = torch.arange(self.block_table.shape[1], device=self.block_table.device)
        return self.block_table[entry < self._used_pages[:, None]].clamp_min(0)

    @cached_property
    def last_page_len(self) -> Tensor:
        return (self.lengths - (self._used_pages - 1).clamp_min(0) * self.layout.page_size).int()

    @cached_property
    def cache(self) -> Tensor | None:
        return self._caches[2]

    @cached_property
    def key_cache(self) -> Tensor:
        return self._caches[0]

    @cached_property
    def value_cache(self) -> Tensor:
        return self._caches[1]

    @property
    def _used_pages(self) -> Tensor:
        return (self.lengths.long() + self.layout.page_size - 1) // self.layout.page_size

    @cached_property
    def _held(self) -> Tensor:
        """The slots that hold a token of any KV head, [B, S] bool."""
        return self.occupied if self.occupied.dim() == 2 else self.occupied.any(1)

    @cached_property
    def _pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, n, page_size, Hkv, D], NaN in free slots."""
        size, slots = self.layout.page_size, self._held.shape[1]
        free = ~(self.occupied if self.occupied.dim() == 3 else self.occupied[:, None])[..., None]
        found = []
        for tensor in (self.case.key, self.case.value):
            held = tensor.masked_fill(free, math.nan).transpose(1, 2)                         # [B, S, Hkv, D]
            held = torch.nn.functional.pad(held, (0, 0, 0, 0, 0, -slots % size), value=math.nan)
            found.append(held.unflatten(1, (-1, size)))
        return found[0], found[1]

    @cached_property
    def _table(self) -> tuple[Tensor, int]:
        """block_table, and the number of pages of the cache."""
        key, value = self._pages
        batch, count = key.shape[:2]
        padded = torch.nn.functional.pad(self._held, (0, -self._held.shape[1] % self.layout.page_size))
        holds = padded.unflatten(1, (-1, self.layout.page_size)).any(2)                       # [B, n]
        owner: dict[Any, int] = {}
        number = torch.full((batch, count), -1, dtype=torch.int64)
        for row, entry in holds.nonzero().tolist():
            contents: Any = (row, entry)
            if self.layout.shared:
                contents = tuple(bytes(_bits(tensor[row, entry]).cpu().numpy()) for tensor in (key, value))
            number[row, entry] = owner.setdefault(contents, len(owner))
        pages = len(owner) + self.layout.spare
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.layout.seed))
        table = torch.where(number < 0, -1, order[number.clamp_min(0)]) if pages else number
        return table.int().to(self.occupied.device), pages

    @cached_property
    def _caches(self) -> tuple[Tensor, Tensor, Tensor | None]:
        table, pages = self._table
        size, heads, dim = self._pages[0].shape[2:]
        shape = (size, heads, dim) if self.layout.order == "tokens_first" else (heads, size, dim)
        room = 2 * pages if self.layout.apart else pages
        parts = 1 if self.layout.joined else 2
        own = [
            torch.full(
                (max(1, room), *([2] if self.layout.joined else []), *shape), math.nan, dtype=self.case.dtype,
                device=table.device,
            )[::2 if self.layout.apart else 1]
            for _ in range(parts)
        ]
        key, value = (own[0][:, 0], own[0][:, 1]) if self.layout.joined else own
        used = table >= 0
        for cache, held in zip((key, value), self._pages, strict=True):
            contents = held[used]                                                             # [n, page_size, Hkv, D]
            cache[table[used].long()] = contents if self.layout.order == "tokens_first" else contents.transpose(1, 2)
        return key, value, own[0] if self.layout.joined else None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def paged_views(case: DecodeCase | KeyCase, layouts: Sequence[PagedLayout] = LAYOUTS) -> Iterator[PagedView]:
    """The case in each layout."""
    for layout in layouts:
        yield PagedView(case, layout)
