"""LongFlow's decode step over pages and FP8 in plain PyTorch: right ones, and subclasses that are wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....reference.contract import Pages
from .longflow import Decode


class Scaled(Decode):
    """`decode_attention` with scales of FP8 keys and values, right."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, key_scale: Tensor | None = None,
        value_scale: Tensor | None = None, **options: Any,
    ) -> Any:
        key, value = self.dequantize(key, value, key_scale, value_scale)
        return super().__call__(query, key, value, occupied, **options)

    def dequantize(
        self, key: Tensor, value: Tensor, key_scale: Tensor | None, value_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self.product(key, key_scale), self.product(value, value_scale)

    def product(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        return codes.double() if scale is None else codes.double() * scale.double().view(-1, 1, 1)


class Paged(Scaled):
    """`paged_decode_attention`, right. It gathers the slots of each row first."""

    def __call__(  # type: ignore[override]
        self, query: Tensor, pages: Pages, occupied: Tensor, *, key_scale: Tensor | None = None,
        value_scale: Tensor | None = None, **options: Any,
    ) -> Any:
        key, value = (self.slots(cache, pages.block_table, occupied) for cache in (pages.key_cache, pages.value_cache))
        return super().__call__(
            query, key, value, occupied, key_scale=key_scale, value_scale=value_scale, **options
        )

    def slots(self, cache: Tensor, table: Tensor, occupied: Tensor) -> Tensor:
        """[B, Hkv, S, D] float64."""
        return self.rows(cache.double(), table)[:, :occupied.shape[-1]].transpose(1, 2)

    def rows(self, cache: Tensor, table: Tensor) -> Tensor:
        """All slots of a row's pages, [B, n * page_size, Hkv, D]."""
        return cache[table.long().clamp_min(0)].flatten(1, 2)


class PagedWithoutScales:
    """`paged_decode_attention` without FP8, right."""

    def __call__(
        self, query: Tensor, pages: Pages, occupied: Tensor, *, scale: float | None = None, per_head: bool = False,
        protected: Tensor | None = None, check_finite: bool = False,
    ) -> Any:
        return Paged()(query, pages, occupied, scale=scale, per_head=per_head, protected=protected)


# Wrong over pages -----------------------------------------------------------------------------------------------------


class LastPageIsNotRead(Paged):
    """The loop over pages ends one too early."""

    def __call__(self, query: Tensor, pages: Pages, occupied: Tensor, **options: Any) -> Any:  # type: ignore[override]
        size = pages.key_cache.shape[1]
        seen = torch.arange(occupied.shape[-1]) < (occupied.shape[-1] - 1) // size * size
        output, score, _ = super().__call__(query, pages, occupied & seen, **options)
        return output, score, super().__call__(query, pages, occupied, **options)[2]


class LastPageIsReadToItsEnd(Paged):
    """Whatever lies behind the last slot counts as a token."""

    def __call__(self, query: Tensor, pages: Pages, occupied: Tensor, **options: Any) -> Any:  # type: ignore[override]
        slots, size = occupied.shape[-1], pages.key_cache.shape[1]
        seen = torch.nn.functional.pad(occupied, (0, -slots % size), value=True)
        if options.get("protected") is not None:
            options["protected"] = torch.nn.functional.pad(options["protected"], (0, -slots % size), value=True)
        output, score, slot = super().__call__(query, pages, seen, **options)
        return output, score[..., :slots], slot.clamp_max(slots - 1)


class FreeSlotsInPagesAreRead(Paged):
    """0 times what lies in a free slot, or in a page that is none, which is NaN if that is NaN or infinite."""

    def read(self, key: Tensor, value: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        return key.masked_fill(~held[..., None], 0), value


class FirstRowsPages(Paged):
    def rows(self, cache: Tensor, table: Tensor) -> Tensor:
        return super().rows(cache, table[:1].expand_as(table))


class PagesInOrder(Paged):
    """The block table is not read."""

    def rows(self, cache: Tensor, table: Tensor) -> Tensor:
        return super().rows(cache, torch.arange(table.numel()).view(table.shape) % len(cache))


class RightForContiguousPages(Paged):
    def slots(self, cache: Tensor, table: Tensor, occupied: Tensor) -> Tensor:
        room = cache.untyped_storage().nbytes() // cache.element_size()
        plain = torch.empty(cache.shape, device="meta").stride()
        if cache.numel() <= room:
            cache = cache.as_strided(cache.shape, plain)
        return super().slots(cache, table, occupied)


class PagesAreChanged(Paged):
    """Each row's first slot is written back with one more."""

    def __call__(self, query: Tensor, pages: Pages, occupied: Tensor, **options: Any) -> Any:  # type: ignore[override]
        result = super().__call__(query, pages, occupied, **options)
        first = pages.block_table[0, 0].clamp_min(0)
        pages.value_cache[first, 0] = (pages.value_cache[first, 0].float() + 1).to(pages.value_cache.dtype)
        return result


class OnlyPagesOf16(Paged):
    """Right for pages of 16 slots, and an error for others."""

    def rows(self, cache: Tensor, table: Tensor) -> Tensor:
        assert cache.shape[1] == 16, "pages of 16 slots"
        return super().rows(cache, table)


# Wrong over FP8 -------------------------------------------------------------------------------------------------------


class NoValueScale(Paged):
    def dequantize(self, key: Tensor, value: Tensor, key_scale: Any, value_scale: Any) -> tuple[Tensor, Tensor]:
        return super().dequantize(key, value, key_scale, None)


class NoKeyScale(Scaled):
    def dequantize(self, key: Tensor, value: Tensor, key_scale: Any, value_scale: Any) -> tuple[Tensor, Tensor]:
        return super().dequantize(key, value, None, value_scale)


class KeyScaleForValues(Paged):
    def dequantize(self, key: Tensor, value: Tensor, key_scale: Any, value_scale: Any) -> tuple[Tensor, Tensor]:
        return super().dequantize(key, value, key_scale, key_scale)


class ScaleOfTheFirstHead(Paged):
    def product(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        return super().product(codes, scale if scale is None else scale.reshape(-1)[:1])


class ScaledNumbersAreRounded(Scaled):
    """To bfloat16."""

    def product(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        product = super().product(codes, scale)
        return product if scale is None else product.bfloat16().double()


class E5m2IsReadAsE4m3(Scaled):
    def product(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        same = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.float8_e5m2 else codes
        return super().product(same, scale)
