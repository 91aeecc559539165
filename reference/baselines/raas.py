"""RaaS: each token has a timestamp, renewed when a query attends to it enough; the oldest timestamp is evicted.

Paper: Hu et al., "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning" (2025, arXiv 2502.11147). By
default single tokens have timestamps, as in ThinKV's and EpiKV's tables. With a `page_size`, pages have them, as in the
authors' code: a query renews those with the highest bounds of its logits (Quest's bounds), and whole pages are evicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention import INF, accumulate_dtype, exact, per_query_head
from ..blocks import BlockState, Chunk, IntervalConfig, group_mean
from ..contract.arguments import check_integer, check_ratio
from ..contract.blocks import check_protected
from ..selection import order, top_k, victims

__all__ = ["RaaSConfig", "RaaSState"]


@dataclass(frozen=True)
class RaaSConfig(IntervalConfig):
    """Configuration of a RaaS cache. It needs either an alpha or a page_size.

    budget, block_size: see `BlockConfig`. alpha: the least weight of a query that renews a token's timestamp, from 0
    to 1; there is no default, because it depends on the number of tokens. sinks: the number of first tokens that are
    never evicted, padding not counted; the paper protects the prompt. recent: the number of newest tokens that are
    protected. recent + sinks is at most budget. interval: see `IntervalConfig`.

    page_size: the number of successive tokens, padding not counted, that have one timestamp and are evicted together;
    16 in the authors' code. It is at most budget, and interval is at least page_size. Evictions leave budget //
    page_size complete pages, and the incomplete one of the newest tokens. sinks and recent protect each page that has
    one of these tokens, at most budget // page_size pages in all. Raises TypeError or ValueError for invalid arguments.
    """

    alpha: float | None = field(default=None, kw_only=True)
    recent: int = 0
    sinks: int = 0
    interval: int = 1
    page_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_size is None:
            check_ratio("alpha", self.alpha)
            check_protected(check_integer("recent", self.recent, minimum=0), self.sinks, self.budget)
            return
        size = check_integer("page_size", self.page_size, minimum=1)
        if self.alpha is not None:
            raise ValueError(f"alpha must be None with a page_size, got {self.alpha!r}")
        if size > self.budget:
            raise ValueError(f"page_size must be at most budget = {self.budget}, got {size}")
        if self.interval < size:
            raise ValueError(f"interval must be at least page_size = {size}, got {self.interval}")
        first, newest = (
            -(-check_integer(name, getattr(self, name), minimum=0) // size) for name in ("sinks", "recent")
        )
        if first + newest > self.page_budget:
            raise ValueError(
                f"sinks and recent must need at most budget // page_size = {self.page_budget} pages, "
                f"got {self.sinks} and {self.recent} tokens: {first} + {newest} pages"
            )

    @property
    def page_budget(self) -> int:
        """The number of complete pages that an eviction leaves; without a page_size, of tokens."""
        return self.budget // (self.page_size or 1)

    @classmethod
    def defaults_for(cls, budget: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Ours, one of the four that the authors tried."""
        return {"alpha": 0.02} if given.get("page_size") is None else {}


def page_bound(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """sum_d max(q_d low_d, q_d high_d): at least q . k of each key between low and high (Quest, section 3.3).

    query [B, Hq, D]; low, high [B, Hkv, pages, D]: the least and the greatest number in each channel of a page's keys.
    Returns [B, Hq, pages].
    """
    low, high = (per_query_head(end, query.shape[1]) for end in (low, high))
    return torch.maximum(query[:, :, None] * low, query[:, :, None] * high).sum(-1)


class RaaSState(BlockState):
    """A RaaS cache, see `BlockState`. Of equal timestamps, the oldest token or page is evicted. `score` is each token's
    timestamp: the position of the last query whose weight for the token, averaged over the group, was at least alpha,
    or the token's own position.

    With a page_size, it is the timestamp of the token's page: the position of the last query that renewed the page, or
    of its newest token. A query renews budget // page_size // 2 of the pages before its own: those with the highest
    `page_bound`, averaged over the group, the oldest of equal ones. The incomplete page of the newest tokens stays."""

    Config = RaaSConfig
    _per_slot: ClassVar[tuple[str, ...]] = (*BlockState._per_slot, "_index")
    _per_row: ClassVar[tuple[str, ...]] = (*BlockState._per_row, "_valid_seen")

    def _allocate(self) -> None:
        super()._allocate()
        # Used with a page_size.
        self._index = torch.full_like(self.positions, -1)                        # among the row's tokens, no padding
        self._valid_seen = torch.zeros(self.sizes.batch, dtype=torch.int64, device=self.device)

    def _observe(self, chunk: Chunk) -> None:
        time = self._times_of_tokens(chunk) if self.config.page_size is None else self._times_of_pages(chunk)
        time = time.to(self.score.dtype)
        self.score.copy_(torch.maximum(self.score, time).masked_fill(~self.occupied, -INF))

    def _rank(self) -> tuple[Tensor, Tensor]:
        rank = self.score.masked_fill(~self.occupied, 0).long() * 2**31 + self.positions
        sinks, recent, size = self.config.sinks, self.config.recent, self.config.page_size
        if size is None:
            return rank, self._oldest(sinks) | self._newest(recent)
        first, newest = -(-sinks // size), (self._valid_seen - recent)[:, None, None] // size
        page = self._index // size
        return rank, self.occupied & ((page < first) | (page >= newest))

    # Single tokens ---------------------------------------------------------------------------------------------------

    def _times_of_tokens(self, chunk: Chunk) -> Tensor:
        """The last query of a block that renews each token, or the token's position: [B, Hkv, S]."""
        weight = group_mean(chunk.weight, self.sizes.key_value_heads)                   # [B, Hkv, Q, S]
        asks = chunk.positions.where(chunk.valid, -1)[:, None, :, None]                 # [B, 1, Q, 1]
        attends = self.occupied[:, :, None] & (self.positions[:, :, None] <= asks)
        renewed = asks.where(attends & (weight >= self.config.alpha), -1).amax(2)       # [B, Hkv, S]
        return torch.maximum(renewed, self.positions)

    # Pages -----------------------------------------------------------------------------------------------------------

    def _times_of_pages(self, chunk: Chunk) -> Tensor:
        """The last query of a block that renews each token's page, or the page's newest token: [B, Hkv, S]."""
        size, start, count = self.config.page_size, self.config.capacity, chunk.valid.shape[1]
        index = self._valid_seen[:, None] + chunk.valid.cumsum(1) - 1                   # [B, Q]
        self._index[..., start:start + count] = index[:, None]
        self._index.masked_fill_(~self.occupied, -1)
        self._valid_seen += chunk.valid.sum(1)

        # Pages come and go whole: by age, each is `size` tokens in a row, and the incomplete one is the last.
        age = self._index.where(self.occupied, 2**31)
        pages = self.sizes.slots // size
        slot = victims(age, pages * size).unflatten(-1, (pages, size))                  # [B, Hkv, pages, size]
        number = self._index.gather(-1, slot[..., 0]) // size                           # [B, Hkv, pages]
        incomplete = (self._valid_seen // size)[:, None, None]                          # the number of that page
        complete = (number >= 0) & (number < incomplete)
        low, high = self._ranges(slot)
        time = self.positions.gather(-1, slot[..., -1])                                 # its newest token
        for query, asks, own, position in zip(
            chunk.query.unbind(2), chunk.valid.unbind(1), (index // size).unbind(1), chunk.positions, strict=True
        ):
            before = complete & (number < own[:, None, None]) & asks[:, None, None]
            time = torch.where(self._renewed(query, low, high, before), position, time)
        newest = self.positions.amax(-1, keepdim=True)
        of_page = time.gather(-1, (order(age) // size).clamp_max(pages - 1))
        return torch.where(self._index // size == incomplete, newest, of_page)

    def _ranges(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest number in each channel of the keys in these slots [B, Hkv, pages, size]: both
        [B, Hkv, pages, D]."""
        at = slot.flatten(2)[..., None].expand(-1, -1, -1, self.sizes.head_dim)
        keys = self.key.gather(2, at).unflatten(2, slot.shape[2:]).to(accumulate_dtype(self.key))
        return keys.amin(3), keys.amax(3)

    def _renewed(self, query: Tensor, low: Tensor, high: Tensor, before: Tensor) -> Tensor:
        """The pages that a query [B, Hq, D] renews, of those `before` its own: both [B, Hkv, pages] bool. A negative
        scale turns the query around."""
        query = query.to(low.dtype) * (-1 if self.scale < 0 else 1)
        with exact(query):
            bound = group_mean(page_bound(query, low, high), self.sizes.key_value_heads)
        best = top_k(bound.masked_fill(~before, -INF), self.config.page_budget // 2)
        return before & torch.zeros_like(before).scatter(-1, best, True)

    def _keep_mask(self, rank: Tensor, protected: Tensor) -> Tensor:
        """With a page_size, the oldest timestamps leave by whole pages, down to budget // page_size complete ones. A
        page's tokens have successive ranks."""
        if self.config.page_size is None:
            return super()._keep_mask(rank, protected)
        size, pages = self.config.page_size, self.config.page_budget
        leave = (self.occupied.sum(-1, keepdim=True) // size - pages).where(self._due(), 0) * size
        may_leave = self.occupied & ~protected
        return self.occupied & ~(may_leave & (order(rank.where(may_leave, 2**62)) < leave))
