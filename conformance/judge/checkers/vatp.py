"""VATP judged: H2O's sums, bounds of their products with the values' sizes, and its configs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines import vatp
from ...cases import block_cases
from ..bounds import FLUSH, SLACK, UNIT, Interval, gamma
from ...cases.case import Case
from . import blocks, h2o
from .blocks import SMALL as SMALL
from .blocks import Piece

CASES = (block_cases.AttendCase,)
arguments = h2o.arguments
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "half of it recent": {"budget": 6, "block_size": 4},
    "none recent": {"budget": 5, "block_size": 3, "recent": 0},
    "budget 1": {"budget": 1, "block_size": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "recent": 4}, ValueError, "recent must be less than budget = 4"),
]


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    frame = draw(blocks.frames(most))
    return {**frame, "recent": draw(st.none() | st.integers(0, frame["budget"] - 1))}


def product_interval(piece: Piece, error: Tensor) -> Interval:
    """Where the computed score * ||v||_1 may lie, [B, Hkv, S], of a score within `error` of the truth.

    ||v||_1 sums D nonnegative numbers, gamma(D), of which subnormal ones may vanish, FLUSH each; a zero value has a
    norm of exactly 0, and ranks there. The product rounds once, and may vanish: FLUSH.
    """
    occupied = piece.before["occupied"]
    score = piece.before["score"].masked_fill(~occupied, 0)
    norm = piece.before["value"].masked_fill(~occupied[..., None], 0).abs().sum(-1)
    head_dim = piece.before["value"].shape[-1]
    loss = gamma(head_dim) * norm + head_dim * FLUSH * (norm > 0)
    low = (score - error).clamp_min(0) * (norm - loss).clamp_min(0)
    high = (score + error) * (norm + loss)
    flush = FLUSH * (norm > 0)
    return Interval(low * (1 - UNIT * SLACK) - flush, high * (1 + UNIT * SLACK) + flush)


def zero_values(piece: Piece) -> Tensor:
    """Classes of tokens that must rank the same, [B, Hkv, S]: those whose values are zeros, which rank 0 exactly."""
    value, occupied = piece.before["value"], piece.before["occupied"]
    zero = occupied & (value == 0).all(-1)
    index = torch.arange(piece.slots, device=value.device).expand(zero.shape)
    return torch.where(zero, index.where(zero, piece.slots).amin(-1, keepdim=True), index)


class Adapter(h2o.Adapter):
    """Ranks are products of the scores with the values' sizes."""

    def rank_interval(self, piece: Piece, error: Tensor) -> Interval:
        return product_interval(piece, error)

    def ties(self, piece: Piece) -> Tensor:
        return zero_values(piece)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    yield from blocks.replay_attend(case, module, "vatp", vatp.attend, h2o.attend_error)
