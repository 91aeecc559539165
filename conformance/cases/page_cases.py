"""Cases of Quest's functions: keys in pages, bounds of pages with queries, and scores of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from .. import capabilities
from . import contents, draws, supported
from .case import Case
from .layouts import lay_out
from .strategies import DTYPES, PLAIN_DTYPES, TRIPLES, _common, _counts, _masks, contents_of, default_device

LAYOUTS = ("contiguous", "transposed", "sliced", "spread", "channels_first")
KEYS, EXTREME_KEYS = ("ordinary", "positive", "negative"), ("largest", "subnormal", "special")
SCORED, EXTREME_SCORED = ("ordinary", "positive"), ("large", "tiny", "zero_query")
#: Scores: each higher, or lower, than the one before; few different ones, and equal ones, with zeros of both signs; NaN
#: and infinity among them.
RANKED, TIED, EXTREME_RANKED = ("ordinary", "rising", "falling"), ("few", "equal"), ("special",)
PAGE_SIZES = (4, 1, 2, 3, 16, 32)


def fill(content: str, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of the given content, rounded to `dtype`."""
    limits, device = torch.finfo(dtype), generator.device
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    if content in ("positive", "negative"):
        x = x.abs() if content == "positive" else -x.abs()
    elif content == "largest":
        x = limits.max * x.clamp(-1, 1)
    elif content == "subnormal":
        x = limits.tiny * x / 4
    elif content == "large":
        x = 1e4 * x
    elif content == "tiny":
        x = limits.tiny**0.5 * x
    elif content in ("few", "equal"):
        x = (2 * x).round() / 2 if content == "few" else x[..., :1].expand(shape)
    elif content in ("rising", "falling"):
        x = x.sort(dim=-1, descending=content == "falling").values
    elif content == "special":
        other = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0], dtype=torch.float64, device=device)
        chosen = other[torch.randint(len(other), shape, generator=generator, device=device)]
        x = chosen.where(torch.rand(shape, generator=generator, device=device) < 0.3, x)
    return x.to(dtype).contiguous()


@dataclass(frozen=True, repr=False)
class KeyPagesCase(Case):
    """Arguments of `page_bounds`: key [B, Hkv, T, D]. last_page: "full", so that T is rounded up to whole pages, or
    "partial": the last page has fewer tokens, if it has more than one, and the memory behind them holds `poison`."""

    kind: ClassVar[str] = "key_pages"

    tokens: int = 1
    page_size: int = 4
    last_page: str = "full"

    key = property(lambda self: self.tensor("key"))

    @property
    def length(self) -> int:
        whole = -(-self.tokens // self.page_size) * self.page_size
        return whole if self.last_page == "full" else min(self.tokens, whole - (self.page_size > 1))

    def make(self) -> dict[str, Tensor | None]:
        shape = (self.batch, self.key_value_heads, self.length, self.head_dim)
        return {"key": fill(self.content, self.generator(), shape, self.dtype)}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        if self.last_page == "full" or capabilities.current().contiguous_only:
            return super().place(name, tensor)
        batch, _, length, _ = tensor.shape
        room = 4 * tensor.repeat(1, 1, 1 + self.page_size, 1)[:, :, :length + self.page_size]    # poison "stale"
        room[:, :, :length] = tensor
        held = torch.arange(length + self.page_size, device=tensor.device).expand(batch, -1) < length
        return lay_out(contents.poison(self.poison, room, held), self.layout)[:, :, :length]

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {"key": self.key, "page_size": self.page_size}


@dataclass(frozen=True, repr=False)
class PageBoundsCase(Case):
    """Arguments of `page_scores`: query [B, Hq, D], maximum and minimum [B, Hkv, P, D]. slots: P, the pages."""

    kind: ClassVar[str] = "page_bounds"

    slots: int = 1

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        content = "ordinary" if self.content == "zero_query" else self.content
        shape = (self.batch, self.key_value_heads, self.slots, self.head_dim)
        one, other = (fill(content, generator, shape, self.dtype) for _ in range(2))
        query = fill(content, generator, (self.batch, self.query_heads, self.head_dim), self.dtype)
        if self.content == "large":  # the products, not both of their factors
            query = query / 1e4
        query = query * (self.content != "zero_query")
        return {"query": query, "maximum": torch.maximum(one, other), "minimum": torch.minimum(one, other)}

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {name: self.tensor(name) for name in ("query", "maximum", "minimum")}


@dataclass(frozen=True, repr=False)
class RankedPagesCase(Case):
    """Arguments of `select_pages`: score [B, Hq, P], count [B]. slots: P. keep: k. protect: "last", if the last page is
    always selected, or "none". occupancy: "full", so that each row has all pages, "random" or "empty_row". Scores of
    pages that a row does not have hold `poison`."""

    kind: ClassVar[str] = "ranked_pages"

    slots: int = 1
    keep: int = 1
    protect: str = "none"
    occupancy: str = "full"

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        shape = (self.batch, self.query_heads, self.slots)
        count = torch.full((self.batch,), self.slots, device=self.device)
        if self.occupancy != "full":
            count = torch.randint(0, self.slots + 1, (self.batch,), generator=generator, device=self.device)
        if self.occupancy == "empty_row":
            count[0] = 0
        page = torch.arange(self.slots, device=self.device)
        score = fill(self.content, generator, shape, self.dtype)[..., None]
        return {"score": contents.poison(self.poison, score, page < count[:, None])[..., 0], "count": count}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if name == "count" else super().place(name, tensor)

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {
            "score": self.tensor("score"), "count": self.tensor("count"), "k": self.keep,
            "keep_last": self.protect == "last",
        }


# Strategies ----------------------------------------------------------------------------------------------------------


@st.composite
def key_pages_cases(
    draw: st.DrawFn, *, content: Sequence[str] = (*KEYS, *EXTREME_KEYS), layout: tuple[str, ...] = LAYOUTS,
    last_page: Sequence[str] = ("full", "partial"), tokens: tuple[int, int] = (1, 40),
) -> KeyPagesCase:
    """One to forty pages."""
    layouts = supported.layouts(layout)
    sizes = draw(_common(None, TRIPLES))
    return KeyPagesCase(
        **{**sizes, "group": 1}, content=draw(contents_of(content, KEYS)), seed=draw(st.integers(0, 2**31 - 1)),
        layout=draw(st.sampled_from(layouts)), poison=draw(st.sampled_from(contents.POISONS)),
        tokens=draw(_counts(sizes, tokens[1], least=tokens[0])),
        page_size=draw(st.sampled_from(supported.sizes("page_sizes", PAGE_SIZES))),
        last_page=draw(st.sampled_from(last_page)),
    )


@st.composite
def page_bounds_cases(
    draw: st.DrawFn, *, content: Sequence[str] = (*SCORED, *EXTREME_SCORED), layout: tuple[str, ...] = LAYOUTS,
    pages: tuple[int, int] = (1, 40),
) -> PageBoundsCase:
    layouts = supported.layouts(layout)
    sizes = draw(_common(None, TRIPLES))
    return PageBoundsCase(
        **sizes, content=draw(contents_of(content, SCORED)), seed=draw(st.integers(0, 2**31 - 1)),
        layout=draw(st.sampled_from(layouts)), slots=draw(st.integers(*pages)),
    )


@st.composite
def ranked_pages_cases(
    draw: st.DrawFn, *, content: Sequence[str] = (*RANKED, *TIED, *EXTREME_RANKED), layout: tuple[str, ...] = LAYOUTS,
    occupancy: Sequence[str] = ("full", "random", "empty_row"), protect: Sequence[str] = ("none", "last"),
    pages: tuple[int, int] = (1, 40),
) -> RankedPagesCase:
    """k from 1 to beyond the number of pages, most often less than it."""
    plain = draws.plain_only()
    last = supported.values("keep_last", [one == "last" for one in protect])
    dtypes, layouts = draws.plain_among(supported.dtypes(DTYPES), PLAIN_DTYPES), supported.layouts(layout)
    masks = _masks(occupancy, "full")
    total = draw(st.integers(max(3, pages[0]) if plain else pages[0], pages[1]))
    fewer = st.integers(1, max(1, total - 1))
    return RankedPagesCase(
        batch=draw(st.integers(1, supported.rows(2))),
        key_value_heads=draw(st.sampled_from(supported.sizes("kv_heads", (1, 2)))),
        group=draw(st.sampled_from(supported.sizes("groups", (1, 2, 3)))),
        dtype=draw(st.sampled_from(dtypes)),
        content=draw(contents_of(content, (*RANKED, *TIED))), layout=draw(st.sampled_from(layouts)),
        poison=draw(st.sampled_from(contents.POISONS)), seed=draw(st.integers(0, 2**31 - 1)),
        device=str(default_device()), slots=total, keep=draw(fewer if plain else fewer | st.integers(1, total + 2)),
        protect="last" if draw(st.sampled_from(last)) else "none",
        occupancy=draw(masks),
    )
