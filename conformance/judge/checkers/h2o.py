"""H2O judged: bounds of its sums of weights, which add up over a token's life, and its configs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines import h2o
from ...cases import block_cases
from ..bounds import SLACK, UNIT, Arithmetic, Interval
from ...cases.case import Case
from . import blocks
from .blocks import SMALL as SMALL
from .blocks import Piece, received_error

CASES = (block_cases.AttendCase,)
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "half of it recent": {"budget": 6, "block_size": 4},
    "none recent": {"budget": 5, "block_size": 3, "recent": 0},
    "budget 1": {"budget": 1, "block_size": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "recent": 5}, ValueError, "recent must be at most budget = 4"),
    ({"budget": 4, "recent": 1.0}, TypeError, "recent must be an int"),
]


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    frame = draw(blocks.frames(most))
    return {**frame, "recent": draw(st.none() | st.integers(0, frame["budget"]))}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    return blocks.attend_arguments(device)


def sum_error(piece: Piece) -> Tensor:
    """|computed - true| of the sums of weights after a piece, [B, Hkv, S].

    What a token's sum had lost before (`carried`), what this piece's column sum loses (`received_error`), and one
    rounding of their sum: u (|score| + both).
    """
    error = piece.carried + piece.wide(received_error(piece.attention, piece.allowed))
    score = piece.before["score"].masked_fill(~piece.before["occupied"], 0)
    error = error + UNIT * (score.abs() + error) * SLACK
    return error.masked_fill(~piece.before["occupied"], 0)


def attend_error(case: block_cases.AttendCase, allowed: Arithmetic) -> Tensor:
    """Bound of `attend(...).received`, [B, Hkv, S]."""
    return received_error(case.attention, allowed)


class Adapter(blocks.Adapter):
    """Ranks are the scores. No two tokens tie: equal ones came at different times, so other queries saw them."""

    def score_error(self, piece: Piece) -> Tensor:
        return sum_error(piece)

    def rank_interval(self, piece: Piece, error: Tensor) -> Interval:
        return Interval(piece.before["rank"] - error, piece.before["rank"] + error)

    def ties(self, piece: Piece) -> Tensor:
        return blocks.no_ties(piece)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    yield from blocks.replay_attend(case, module, "h2o", h2o.attend, attend_error)
