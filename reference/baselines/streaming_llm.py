"""StreamingLLM: keep the first tokens (attention sinks) and the newest ones.

Paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024, arXiv 2309.17453).
By default, queries and keys have the rotary embedding of their token's position in the text. With `inv_freq` they come
without one, as in the original method, and are rotated by the token's place in the cache when they attend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention import accumulate_dtype, per_query_head
from ..blocks import BlockConfig, BlockState
from ..contract.arguments import check_frequencies, check_integer, check_pairs, check_positions
from ..selection import order

__all__ = ["StreamingLLMConfig", "StreamingLLMState", "keep"]


@dataclass(frozen=True)
class StreamingLLMConfig(BlockConfig):
    """Configuration of a StreamingLLM cache.

    budget, block_size: see `BlockConfig`. sinks: the number of first tokens that are kept, an int from 0 to budget - 1.
    inv_freq: the frequencies of the model's rotary embedding, a tuple of n <= head_dim / 2 numbers above 0 and at most
    1. The state then takes queries and keys before their rotation, stores such keys, and rotates the channels d and d +
    n, for all d < n, by the angle place * inv_freq[d] when they attend. The place of a token is the number of older
    tokens in the cache of its KV head; a block is in the cache when it attends. Channels from 2 n on are not rotated.
    None: nothing is rotated; queries and keys come with the rotation by their position in the text.
    Raises TypeError or ValueError for invalid arguments.
    """

    sinks: int = 4
    inv_freq: tuple[float, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sinks(self.sinks, self.budget)
        if self.inv_freq is not None:
            check_frequencies("inv_freq", self.inv_freq)

    @classmethod
    def defaults_for(cls, budget: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fewer first tokens than the authors' four in a smaller budget."""
        return {} if budget > 4 else {"sinks": max(0, budget - 1)}


def check_sinks(sinks: object, budget: int) -> None:
    """An int from 0 to budget - 1."""
    if check_integer("sinks", sinks, minimum=0) >= budget:
        raise ValueError(f"sinks must be less than budget = {budget}, got {sinks}")


def keep(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    """The tokens to keep: the `sinks` oldest and the budget - sinks newest, or all if a row has at most `budget`.

    positions [..., S] int64, distinct in each row, -1 = no token. Returns [..., S] bool. TypeError or ValueError for
    invalid arguments.
    """
    check_positions(positions)
    check_integer("budget", budget, minimum=1)
    check_sinks(sinks, budget)
    place, slots = order(positions), positions.shape[-1]
    free = (positions < 0).sum(-1, keepdim=True)
    # free + sinks could exceed int64.
    first, newest = place < free + min(sinks, slots), place >= slots - (budget - sinks)
    return (first | newest) & (positions >= 0)


class StreamingLLMState(BlockState):
    """A StreamingLLM cache, see `BlockState`. Tokens are ranked by position; `score` is 0 for every token. With
    config.inv_freq, queries and keys come without rotation, and `key` holds such keys. ValueError for more frequencies
    than pairs of channels."""

    Config = StreamingLLMConfig

    def _allocate(self) -> None:
        check_pairs("inv_freq", self.config.inv_freq, self.sizes.head_dim)
        super()._allocate()

    def _compared(self, query: Tensor, end: int) -> tuple[Tensor, Tensor]:
        if self.config.inv_freq is None:
            return super()._compared(query, end)
        positions = self.positions[..., :end]
        place = (order(positions) - (positions < 0).sum(-1, keepdim=True)).clamp_min(0)       # [B, Hkv, end]
        own = per_query_head(place[..., end - query.shape[2]:], query.shape[1])               # [B, Hq, Q]
        return rotate(query, own, self.config.inv_freq), rotate(self.key[:, :, :end], place, self.config.inv_freq)

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.positions, self._oldest(self.config.sinks)


def rotate(vector: Tensor, place: Tensor, inv_freq: tuple[float, ...]) -> Tensor:
    """The rotary embedding of vector [B, H, N, D] by place [B, H, N] int64, in accumulate_dtype."""
    vector = vector.to(accumulate_dtype(vector))
    pairs = len(inv_freq)
    one, other, rest = vector.split([pairs, pairs, vector.shape[-1] - 2 * pairs], -1)
    angle = place[..., None] * torch.tensor(inv_freq, dtype=vector.dtype, device=vector.device)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)
