"""Cases whose keys and values lie in pages, for functions that take `Pages`.

`InPages` adds pages to a class of cases. The tokens are the same as those of the class without pages, and so are the
right results. Memory that is of no slot holds the case's poison, as free slots do: the rest of a row's last page, and
pages that no row has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference.contract import Pages
from . import contents, supported
from .case import Case, DecodeCase
from .fp8_cases import Fp8Case, fp8_cases
from .key_cases import KeyCase, fp8_key_cases, key_cases
from .layouts import MIXED, lay_out, layout_of
from .paged_states import empty_pages
from .paged_view import PagedLayout
from .strategies import decode_cases

#: Sizes of pages; failing examples shrink to the first.
PAGE_SIZES = (4, 16, 1)
#: Memory layouts of pages, by the names that cases have. In "apart" and MIXED, other tensors are strided, too, and in
#: MIXED each has strides of its own.
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {}, "heads_first": {"order": "heads_first"}, "joined": {"joined": True},
    "apart": {"order": "heads_first", "joined": True, "apart": True},
}
PAGED = tuple(LAYOUTS)
#: Whether the slots fill the last page of a row. A full one has as many slots as fit.
LAST_PAGES = ("full", "partial")

if TYPE_CHECKING:
    class _Plain(Case):
        """What `InPages` needs of the class of cases that it is combined with."""

        slots: int
        occupied: Tensor | None
        key: Tensor
        value: Tensor

        @property
        def inputs(self) -> dict[str, Any]: ...
else:
    _Plain = object


class InPages(_Plain):
    """Makes cases in pages of a class of cases. page_size: slots of a page. last_page: one of LAST_PAGES; if it is
    "full", `slots` is rounded up to whole pages. layout: one of LAYOUTS, or MIXED."""

    page_size: int
    last_page: str

    def __post_init__(self) -> None:
        if self.last_page == "full":
            object.__setattr__(self, "slots", -(-self.slots // self.page_size) * self.page_size)

    def place(self, name: str, tensor: Tensor) -> Tensor:
        if name in ("key", "value") or self.layout not in ("apart", MIXED):
            return tensor
        if name.endswith("_scale"):
            return super().place(name, tensor)
        return lay_out(tensor, layout_of(MIXED, name) if self.layout == MIXED else "spread")

    @property
    def held(self) -> Tensor:
        """The argument `occupied` of functions over pages, which take no None: [B, S], or [B, Hkv, S] per head."""
        if self.occupied is not None:
            return self.occupied
        return torch.ones(self.batch, self.slots, dtype=torch.bool, device=self.device)

    @cached_property
    def pages(self) -> Pages:
        """Keys and values in pages whose order the seed decides. Entries of the block table are -1 if none of their
        slots holds a token."""
        made = self._empty("joined" if self.layout == MIXED else self.layout)
        if self.layout == MIXED:  # channels first, and tokens first
            made = made._replace(key_cache=bits(made.key_cache).transpose(1, 3).contiguous().transpose(1, 3))
            made = made._replace(key_cache=made.key_cache.view(self.key.dtype))
        generator = torch.Generator(self.device).manual_seed(self.seed ^ 0x9A6E5)
        room = -self.slots % self.page_size
        for cache, tensor in ((made.key_cache, self.key), (made.value_cache, self.value)):
            numbers = torch.randn(cache.shape, generator=generator, device=self.device).to(tensor.dtype)
            none = torch.zeros(cache.shape[:3], dtype=torch.bool, device=self.device)
            bits(cache).copy_(bits(contents.poison(self.poison, numbers, none)))
            rows = bits(tensor).transpose(1, 2)                                               # [B, S, Hkv, D]
            table, slot = made.block_table.long(), torch.arange(self.slots, device=self.device)
            bits(cache)[table[:, slot // self.page_size], slot % self.page_size] = rows
        any_head = self.held if self.held.dim() == 2 else self.held.any(1)
        used = torch.nn.functional.pad(any_head, (0, room)).unflatten(1, (-1, self.page_size)).any(2)
        table = made.block_table.masked_fill(~used, -1)
        if self.layout in ("apart", MIXED):  # further columns, which are of no slot
            table = torch.nn.functional.pad(table, (0, 2), value=-1).t().contiguous().t()
        return made._replace(block_table=table)

    def _empty(self, layout: str) -> Pages:
        return empty_pages(
            PagedLayout(self.page_size, seed=self.seed, **LAYOUTS[layout]), batch=self.batch, slots=self.slots,
            key_value_heads=self.key_value_heads, head_dim=self.head_dim, dtype=self.key.dtype, device=self.device,
        )

    @property
    def paged_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a function over pages, with the fields of `pages` in place of it."""
        others = {name: value for name, value in self.inputs.items() if name not in ("key", "value")}
        return {**others, "occupied": self.held, **self.pages._asdict()}


def bits(tensor: Tensor) -> Tensor:
    """FP8 numbers as uint8, for operations that do not take them; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def with_pages(inputs: dict[str, Any]) -> dict[str, Any]:
    """`paged_inputs` with `pages` in place of its fields."""
    others = {name: value for name, value in inputs.items() if name not in Pages._fields}
    return {**others, "pages": Pages(*(inputs[name] for name in Pages._fields))}


@dataclass(frozen=True, repr=False)
class PagedDecodeCase(InPages, DecodeCase):
    """Arguments of a `paged_decode_attention`."""

    kind: ClassVar[str] = "decode_pages"

    page_size: int = 16
    last_page: str = "partial"


@dataclass(frozen=True, repr=False)
class PagedFp8Case(InPages, Fp8Case):
    """Arguments of a `paged_decode_attention` with FP8 caches."""

    kind: ClassVar[str] = "decode_pages_fp8"

    page_size: int = 16
    last_page: str = "partial"


@dataclass(frozen=True, repr=False)
class PagedKeyCase(InPages, KeyCase):
    """Arguments of `paged_score` and `paged_evict` of KeyDiff."""

    kind: ClassVar[str] = "keys_pages"

    page_size: int = 16
    last_page: str = "partial"

    @property
    def paged_score_inputs(self) -> dict[str, Any]:
        """Keyword arguments of `paged_score`."""
        return {name: one for name, one in self.paged_inputs.items() if name not in ("budget", "recent", "protected")}


def paged_decode_cases(**more: Any) -> st.SearchStrategy[PagedDecodeCase]:
    """Inputs of a `paged_decode_attention`. more: arguments of `decode_cases`, and `page_size`, `last_page` and
    `poison`, the values to draw from; `layout`: some of LAYOUTS."""
    return _in_pages(PagedDecodeCase, decode_cases, **more)


def paged_fp8_cases(**more: Any) -> st.SearchStrategy[PagedFp8Case]:
    """The same with FP8 caches."""
    return _in_pages(PagedFp8Case, fp8_cases, **more)


def paged_key_cases(**more: Any) -> st.SearchStrategy[PagedKeyCase]:
    """Inputs of `paged_score` and `paged_evict`. more: arguments of `key_cases`, and as in `paged_decode_cases`."""
    return _in_pages(PagedKeyCase, key_cases, **more)


def paged_fp8_key_cases(**more: Any) -> st.SearchStrategy[PagedKeyCase]:
    """The same with FP8 caches, compared by cosines."""
    return _in_pages(PagedKeyCase, fp8_key_cases, **more)


@st.composite
def _in_pages(
    draw: st.DrawFn, made: type[Any], cases: Any, *, page_size: Sequence[int] = PAGE_SIZES,
    last_page: Sequence[str] = LAST_PAGES, poison: Sequence[str] = contents.POISONS,
    layout: Sequence[str] = PAGED, **more: Any,
) -> Any:
    layouts = supported.layouts(layout)
    plain = draw(cases(layout=("contiguous",), **more))
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    last = draw(st.sampled_from(last_page))
    size = draw(st.sampled_from(supported.page_sizes(page_size, plain.slots, last)))
    if last == "partial" and plain.slots > 1 and plain.slots % size == 0 and supported.slots(1, 1)[2] == 1:
        fields["slots"] = plain.slots - 1
    return made(**fields | {
        "layout": draw(st.sampled_from(layouts)), "poison": draw(st.sampled_from(poison)),
        "page_size": size, "last_page": last,
    })
