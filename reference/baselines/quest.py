"""Quest: each query head attends to the pages whose keys could give it the largest logits; no token is evicted.

Paper: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (2024, arXiv 2406.10774). A
page has the keys of 16 consecutive tokens. For each page and channel, the cache stores the largest and the smallest
key. From these follows an upper bound of the page's logits. Each query selects the pages with the largest bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import (
    INF,
    accumulate_dtype,
    attention_weights,
    exact,
    per_query_head,
    weighted_values,
)
from ..contract import MethodConfig
from ..contract.arguments import check_flag, check_integer
from ..contract.quest import check_page_bounds, check_page_scores, check_select_pages
from ..growing_state import GrowingState
from ..selection import top_k

__all__ = ["PageBoundsResult", "QuestConfig", "QuestState", "page_bounds", "page_scores", "select_pages"]


@dataclass(frozen=True)
class QuestConfig(MethodConfig):
    """Configuration of a Quest cache.

    budget: the tokens that a query head attends to, in whole pages: ceil(budget / page_size) of them. page_size: the
    tokens of a page. keep_last: the page of the newest token is always selected; otherwise it competes like any other,
    and a step may not attend to its own token. least_pages: the fewest pages that are selected, whatever the budget.
    round_scores: pages are compared by bounds rounded to the dtype of the queries, which makes more of them equal.
    max_tokens: the longest sequence that a state can hold, prompt, padding and decoded tokens. scale: the factor on
    query . key, by default head_dim ** -0.5. Raises TypeError or ValueError for invalid arguments.
    """

    page_size: int = 16
    keep_last: bool = True
    least_pages: int = 1
    round_scores: bool = False
    max_tokens: int = field(default=32768, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("page_size", self.page_size, minimum=1)
        check_flag("keep_last", self.keep_last)
        check_integer("least_pages", self.least_pages, minimum=1)
        check_flag("round_scores", self.round_scores)
        check_integer("max_tokens", self.max_tokens, minimum=1)

    @property
    def pages_stored(self) -> int:
        """The pages of max_tokens tokens."""
        return -(-self.max_tokens // self.page_size)

    @property
    def pages_selected(self) -> int:
        """The pages that a query head attends to, if it has as many."""
        return min(max(self.least_pages, -(-self.budget // self.page_size)), self.pages_stored)


class PageBoundsResult(NamedTuple):
    """The largest and the smallest key of each page and channel, both [B, Hkv, pages, D] in the keys' dtype."""

    maximum: Tensor
    minimum: Tensor


def page_bounds(key: Tensor, *, page_size: int) -> PageBoundsResult:
    """The largest and the smallest element of each channel among the tokens of each page (algorithm 1, "reduce").

    key [B, Hkv, T, D]: page p has the tokens from p page_size on, the last page those that remain. NaN if a page has
    NaN in this channel. Raises TypeError or ValueError for invalid arguments.
    """
    key, page_size = check_page_bounds(key, page_size)
    missing = -key.shape[2] % page_size
    high, low = (
        pad(key, (0, 0, 0, missing), value=filling).unflatten(2, (-1, page_size)) for filling in (-INF, INF)
    )                                                            # [B, Hkv, pages, page_size, D]
    return PageBoundsResult(high.amax(3), low.amin(3))


def page_scores(query: Tensor, maximum: Tensor, minimum: Tensor) -> Tensor:
    """An upper bound of query . key over the keys of each page, not scaled: sum_d max(q_d M_d, q_d m_d).

    query [B, Hq, D]; maximum, minimum [B, Hkv, pages, D], see `page_bounds`, in query's dtype. Returns [B, Hq, pages]
    in float32, or in float64 for float64 (algorithm 1, "multiply, elementwise max, reduce sum"). Raises TypeError or
    ValueError for invalid arguments.
    """
    query, maximum, minimum = check_page_scores(query, maximum, minimum)
    dtype, heads = accumulate_dtype(query), query.shape[1]
    with exact(query):
        q = query.to(dtype)[:, :, None]                          # [B, Hq, 1, D]
        high, low = (q * per_query_head(bound.to(dtype), heads) for bound in (maximum, minimum))
        return torch.maximum(high, low).sum(-1)                  # [B, Hq, pages]


def select_pages(score: Tensor, count: Tensor, *, k: int, keep_last: bool = True) -> Tensor:
    """The `k` pages with the highest scores, for each query head: [B, Hq, k] int64, ascending, then -1.

    score [B, Hq, P]; count [B] int64, the number of pages of a row, from 0 to P: its first ones. keep_last: the last of
    them is among the selected. Ties go to the lowest index; NaN ranks lowest. Raises TypeError or ValueError for
    invalid arguments.
    """
    score, count, k, keep_last = check_select_pages(score, count, k, keep_last)
    most = score.shape[-1]
    count = count.clamp(0, most)[:, None, None]                  # [B, 1, 1]
    candidates = torch.arange(most, device=score.device) < count - int(keep_last)
    best = top_k(score.masked_fill(~candidates, -INF), min(k - int(keep_last), most))
    best = best.masked_fill(best >= count - int(keep_last), most)  # candidates come first, also those of -inf
    if keep_last:
        last = torch.where(count > 0, count - 1, most).expand(*best.shape[:-1], 1)
        best = torch.cat([best, last], -1)
    best = pad(best, (0, k - best.shape[-1]), value=most).sort(-1).values
    return best.masked_fill(best == most, -1)


class QuestState(GrowingState):
    """The Quest cache of `batch` sequences in one layer.

    Token i of a row, padding not counted, is in slot i of S = config.max_tokens, and in page i // page_size. A step
    appends its token, updates the bounds of the newest page, selects pages for each query head, and attends to their
    tokens. A prompt attends to all of its tokens.

    Readable: occupied [B, S] bool; positions [B, S] int64, counted with padding, -1 = no token; key, value
    [B, Hkv, S, D]; maximum, minimum [B, Hkv, config.pages_stored, D], the bounds of the pages, zeros for those without
    tokens; selected [B, Hq, config.pages_selected] int64, the pages of the last step, ascending, -1 after the last, and
    all -1 if there was no step since the prompt.
    """

    Config = QuestConfig
    config: QuestConfig
    _per_slot: ClassVar[tuple[str, ...]] = (*GrowingState._per_slot, "maximum", "minimum", "selected")

    def _allocate(self) -> None:
        super()._allocate()
        shape, pages = (self.sizes.batch, self.sizes.query_heads, self.config.pages_selected), self.config.pages_stored
        self.maximum, self.minimum = (self._zeros(pages, self.sizes.head_dim, self.dtype) for _ in range(2))
        self.selected = torch.full(shape, -1, dtype=torch.int64, device=self.device)

    def _store_prompt(self, key: Tensor, value: Tensor, occupied: Tensor) -> None:
        super()._store_prompt(key, value, occupied)
        for row, count in enumerate(occupied.sum(1).tolist()):
            if not count:                                                         # a row of padding
                continue
            found = page_bounds(self.key[row:row + 1, :, :count], page_size=self.config.page_size)
            for bound, of_row in zip((self.maximum, self.minimum), found, strict=True):
                bound[row, :, :of_row.shape[2]] = of_row[0]

    def _attend(self, query: Tensor) -> Tensor:
        size, row = self.config.page_size, torch.arange(self.sizes.batch, device=self.device)
        key = self.key[row, :, self._count]                                       # [B, Hkv, D], the new token's
        page, begins = self._count // size, (self._count % size == 0)[:, None, None]
        high, low = self.maximum[row, :, page], self.minimum[row, :, page]        # [B, Hkv, D]
        self.maximum[row, :, page] = torch.where(begins, key, torch.maximum(high, key))
        self.minimum[row, :, page] = torch.where(begins, key, torch.minimum(low, key))
        used = slice(self._seen // size + 1)                                      # no row has more pages
        score = page_scores(query, self.maximum[:, :, used], self.minimum[:, :, used])  # [B, Hq, pages]
        if self.config.round_scores:
            score = score.to(self.dtype)
        self.selected = self._select(query, score, page + 1)
        pages = self.selected[..., :used.stop, None]                              # ascending, then -1
        within = torch.arange(min(size, self.sizes.slots), device=self.device)
        token = (pages * size + within).flatten(2)                                # [B, Hq, n]
        chosen = (token >= 0) & (token <= self._count[:, None, None])
        head = torch.arange(self.sizes.query_heads, device=self.device) // self.sizes.group
        at = row[:, None, None], head[:, None], token.where(chosen, 0)
        weight = attention_weights(query, self.key[at], chosen, scale=self.scale)
        return weighted_values(weight, self.value[at], chosen).to(query.dtype)

    def _select(self, query: Tensor, score: Tensor, count: Tensor) -> Tensor:
        """The pages of a step, see `select_pages`; rows have `count` [B] pages."""
        return select_pages(score, count, k=self.config.pages_selected, keep_last=self.config.keep_last)

    def _visible(self) -> Tensor:
        """The tokens that the last step attended to, [B, Hq, S] bool."""
        pages, size = self.config.pages_stored, min(self.config.page_size, self.sizes.slots)
        chosen = torch.zeros(*self.selected.shape[:2], pages + 1, dtype=torch.bool, device=self.device)
        chosen.scatter_(-1, self.selected.where(self.selected >= 0, pages), True)  # the last is for -1
        tokens = chosen[..., :pages, None].expand(-1, -1, -1, size).flatten(2)
        return tokens[..., :self.sizes.slots] & self.occupied[:, None]
