"""LagKV: keep the tokens of a chunk whose channels vary most, scaled by the range of the next chunk; without queries.

Paper: Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important" (2025, arXiv
2504.04704). Tokens are cut into chunks. The range of each channel in the next chunk scales the keys and values of a
chunk, and the tokens whose channels then differ most are kept. The paper keeps a fixed share of each chunk, so that its
cache grows with the text. Here the cache has a budget: tokens are ranked within their chunks as in the paper, once, and
of all ranked tokens those of the lowest ranks are evicted. So all chunks keep about the same share, which falls as the
text grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention import INF
from ..blocks import BlockState, Chunk, IntervalConfig
from ..contract.arguments import check_integer

__all__ = ["LagKVConfig", "LagKVState"]


@dataclass(frozen=True)
class LagKVConfig(IntervalConfig):
    """Configuration of a LagKV cache.

    budget, block_size: see `BlockConfig`. lag: the number of tokens in a chunk; there is no default, because it depends
    on the budget. sinks: the number of first tokens, padding not counted, that belong to no chunk and are never
    evicted. interval: see `IntervalConfig`. The budget is at least sinks + 2 lag - 1, because so many tokens may have
    no rank. Raises TypeError or ValueError for invalid arguments.
    """

    lag: int = field(kw_only=True)
    sinks: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        lag = check_integer("lag", self.lag, minimum=1)
        unranked = check_integer("sinks", self.sinks, minimum=0) + 2 * lag - 1
        if unranked > self.budget:
            raise ValueError(
                f"sinks + 2 * lag - 1 must be at most budget = {self.budget}, "
                f"got {self.sinks} + 2 * {lag} - 1 = {unranked}"
            )

    @classmethod
    def defaults_for(cls, budget: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Ours. The authors have 16 sinks, and examples with a lag of 64 and 128."""
        return {} if "lag" in given else {"lag": max(1, min(64, budget // 4)), "sinks": min(16, budget // 8)}


def spread(tokens: Tensor, following: Tensor) -> Tensor:
    """The standard deviation over the channels of each token, scaled by the following chunk: [..., C, D] -> [..., C].

    tokens, following [..., C, D] float64. In each channel, the range of `following` becomes 0 to 1; a channel that is
    constant there becomes 0.
    """
    low, high = following.amin(-2, keepdim=True), following.amax(-2, keepdim=True)
    width = high - low
    scaled = torch.where(width > 0, (tokens - low) / width.where(width > 0, 1.0), 0.0)
    centred = scaled - scaled.mean(-1, keepdim=True)
    return (centred.square().sum(-1) / max(1, tokens.shape[-1] - 1)).sqrt()


def log_score(key: Tensor, value: Tensor) -> Tensor:
    """log(softmax(spread of the keys) + softmax(spread of the values)) of the tokens of a chunk: [..., C].

    key, value [..., 2 C, D]: the chunk and the one after it. The last bit of torch's logaddexp depends on the place in
    the tensor. So it is computed once for each pair of logarithms, and equal tokens have equal bits.
    """
    keys, values = (spread(*tensor.double().chunk(2, -2)) for tensor in (key, value))
    pairs = torch.stack([spreads - spreads.logsumexp(-1, keepdim=True) for spreads in (keys, values)], -1)
    found, place = torch.unique(pairs.flatten(0, -2), dim=0, return_inverse=True)
    return torch.logaddexp(found[:, 0], found[:, 1])[place].view(pairs.shape[:-1])


def rank_in_chunk(score: Tensor) -> Tensor:
    """The number of tokens of the chunk that go first: those with a lower score, and earlier ones with an equal score.
    [..., C] -> [..., C] int64."""
    return score.sort(dim=-1, stable=True).indices.argsort(-1)


class LagKVState(BlockState):
    """A LagKV cache, see `BlockState`. `score` is each token's rank in its chunk, from 0 on; `lag` for the sinks and
    for tokens without a rank, because the chunk after theirs is incomplete. Those stay. Of equal ranks, the oldest
    token is evicted."""

    Config = LagKVConfig
    _per_slot: ClassVar[tuple[str, ...]] = (*BlockState._per_slot, "_index")
    _per_row: ClassVar[tuple[str, ...]] = (*BlockState._per_row, "_valid_seen")

    def _allocate(self) -> None:
        super()._allocate()
        self._index = torch.full_like(self.positions, -1)                        # among the row's tokens, no padding
        self._valid_seen = torch.zeros(self.sizes.batch, dtype=torch.int64, device=self.device)

    def _ranked_chunks(self) -> Tensor:
        """The number of chunks of each row whose following chunk is complete, [B] int64."""
        return ((self._valid_seen - self.config.sinks) // self.config.lag - 1).clamp_min(0)

    def _observe(self, chunk: Chunk) -> None:
        count, start, config = chunk.valid.shape[1], self.config.capacity, self.config
        index = self._valid_seen[:, None] + chunk.valid.cumsum(1) - 1                   # [B, Q]
        self._index[..., start:start + count] = index.where(chunk.valid, -1)[:, None]
        before = self._ranked_chunks()
        self._valid_seen += chunk.valid.sum(1)
        self.score[..., start:start + count] = float(config.lag)
        for row, (begin, end) in enumerate(zip(before.tolist(), self._ranked_chunks().tolist(), strict=True)):
            for number in range(begin, end):
                self._rank_chunk(row, config.sinks + number * config.lag)
        self.score.masked_fill_(~self.occupied, -INF)

    def _rank_chunk(self, row: int, first: int) -> None:
        """Rank the tokens first to first + lag - 1 of a row, in each of its heads."""
        lag, head_dim = self.config.lag, self.sizes.head_dim
        tokens = torch.arange(first, first + 2 * lag, device=self.device)
        index = self._index[row].where(self.occupied[row], -1)                           # [Hkv, S]
        slot = (index[:, None] == tokens[:, None]).to(torch.int8).argmax(-1)             # [Hkv, 2 lag]
        at = slot[..., None].expand(-1, -1, head_dim)
        score = log_score(self.key[row].gather(1, at), self.value[row].gather(1, at))    # [Hkv, lag]
        self.score[row].scatter_(-1, slot[:, :lag], rank_in_chunk(score).to(self.score.dtype))

    def _rank(self) -> tuple[Tensor, Tensor]:
        rank = self.score.masked_fill(~self.occupied, 0).long() * 2**31 + self.positions
        return rank, self.occupied & (self.score == self.config.lag)
