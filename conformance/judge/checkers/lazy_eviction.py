"""Checker of LazyEviction: which activations a weight near alpha leaves open, the importances that follow, and configs
to draw."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines.lazy_eviction import EPSILON
from ...cases import draws
from .. import block_model
from ..bounds import DIVISION, EXP, FLUSH, SLACK, UNIT, Interval
from ..variants import BLOCKS, INTERVALS, variant
from . import blocks, raas
from .blocks import Chunk
from .blocks import max_kept as max_kept

REQUIRED = {"alpha": 0.02}
SMALL = {**blocks.SMALL, "alpha": 0.1}
DEFAULTS = {"recent": 0, "shifted": True, "interval": 1, "block_size": 128, "softcap": None, "scale": None}
TRACE = {"alpha": 0.05}

LAWS = ({"interval": 3, "block_size": 5, "recent": 2},)
VARIANTS = (
    *BLOCKS, *INTERVALS,
    variant("newest-protected", {"recent": 3, "alpha": 0.2}, turns=((3, 2),)),
    variant("every-token-is-active", {"alpha": 0.0, "shifted": False, "interval": 2}, padding="random", steps=9),
    variant("a-weight-of-exactly-alpha", {"alpha": 1.0}, content="one_alone", padding="none", turns=((4, 2),)),
    variant("not-shifted", {"shifted": False, "recent": 1}, padding="random"),
)
GROUPINGS = ({"interval": 3},)
COMPILED = ({"softcap": 2.0},)
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4, "alpha": 0.1},
    "newest tokens protected": {"budget": 6, "block_size": 4, "alpha": 0.2, "recent": 3},
    "every token is active": {"budget": 4, "block_size": 3, "alpha": 0.0, "shifted": False},
    "once in four tokens": {"budget": 4, "block_size": 3, "alpha": 0.05, "interval": 4, "recent": 2},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "alpha": None}, TypeError, "alpha must be a float"),
    ({"budget": 4, "alpha": -0.1}, ValueError, "alpha must be from 0 to 1"),
    ({"budget": 4, "alpha": 0.1, "recent": 5}, ValueError, "must be at most budget = 4, got 5"),
    ({"budget": 4, "alpha": 0.1, "shifted": 1}, TypeError, "shifted must be a bool"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("alpha", (True, "0.1", None, torch.tensor(0.1)), TypeError, "alpha must be a float"),
    ("alpha", (-0.1, 1.5, float("nan"), float("inf")), ValueError, "alpha must be from 0 to 1, got"),
    ("recent", blocks.NOT_INTEGERS, TypeError, "recent must be an int"),
    ("recent", (-1,), ValueError, "recent must be at least 0"),
    ("recent", (5,), ValueError, "recent must be at most budget = 4, got 5"),
    ("shifted", (0, 1, None, "yes"), TypeError, "shifted must be a bool"),
    *blocks.INTERVAL_NUMBERS,
]
#: Of the alphas: with a lower one all tokens are active, with a higher one hardly any, and most importances are equal.
SOME = (0.1, 0.2)
SUBJECTS = ()


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    config = draw(blocks.block_configs(most))
    return {
        **config, "recent": draw(st.just(0) | draws.protected(config["budget"], least=0)),
        "alpha": draw(st.sampled_from(draws.plain_among(raas.ALPHAS, SOME))), "shifted": draw(st.booleans()),
        "interval": draw(blocks.INTERVALS),
    }


class Activations(NamedTuple):
    """What a head knows of its tokens, [B, Hkv, S] int64: the earliest and the latest last activation, and the least
    and the largest gap, that computed weights allow."""

    first_last: Tensor
    last: Tensor
    least_gap: Tensor
    gap: Tensor


def active(chunk: Chunk, alpha: float) -> tuple[Tensor, Tensor]:
    """The queries that activate a token for certain, and those that may: [B, Hkv, Q, S] bool."""
    heads = chunk.attention.key_value_heads
    weight = chunk.attention.weight.unflatten(1, (heads, -1)).mean(2)
    seen = chunk.attention.seen.unflatten(1, (heads, -1)).any(2)
    error = raas.weight_error(chunk) + raas.alpha_error(alpha)
    certain = seen & ((weight - error >= alpha) | (alpha == 0))
    possible = seen & (weight + error >= alpha)
    rest = chunk.slots - weight.shape[-1]
    padded = [torch.nn.functional.pad(one, (0, rest)) for one in (certain, possible)]
    return padded[0], padded[1]


def after(chunk: Chunk, known: Activations) -> Activations:
    """What is known after the chunk's queries, in their order."""
    certain, possible = active(chunk, chunk.reference.config.alpha)
    count = chunk.before["query"].shape[2]
    first = chunk.reference.tokens_seen - count
    first_last, last, least, most = known
    for number in range(count):
        now = first + number
        sure, may = certain[:, :, number], possible[:, :, number]
        least = torch.where(sure, torch.maximum(least, now - last), least)
        most = torch.where(may, torch.maximum(most, now - first_last), most)
        first_last, last = torch.where(sure, now, first_last), torch.where(may, now, last)
    return Activations(first_last, last, least, most)


def importances(found: Activations, now: int, *, shifted: bool) -> Interval:
    """Interval of the computed importances.

    The exponent x of the age is a sum, a quotient by a rounded sum, and a product with log2(e): an absolute error of
    |x| (4 u + DIVISION), which covers the 3 u |x| of the second term's exponent. An exponential, a sum and a division
    follow, and the sum of both terms. Terms below FLUSH may flush to zero.
    """
    def term(x: Tensor) -> tuple[Tensor, Tensor]:
        value = 2 * torch.sigmoid(-x)
        relative = torch.expm1((x.abs() * (4 * UNIT + DIVISION) + EXP).clamp_max(300)) + 2 * UNIT + DIVISION
        return value, value * relative + 4 * FLUSH

    def recency(last: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
        return term(float(shifted) + (now - last).double() / (gap.double() + EPSILON))

    def recurring(gap: Tensor) -> tuple[Tensor, Tensor]:
        value, error = term(gap.double() - 1)
        return value.where(gap > 0, 0), error.where(gap > 0, 0)

    aged = recency(found.first_last, found.least_gap), recency(found.last, found.gap)
    # The second term falls with the gap, and is 0 without one.
    fewest = recurring(torch.where(found.least_gap == 0, 0, found.gap))
    most = recurring(torch.where(found.gap == 0, 0, found.least_gap.clamp_min(1)))
    low, high = aged[0][0] + fewest[0], aged[1][0] + most[0]
    low = low - (aged[0][1] + fewest[1] + UNIT * low) * SLACK
    return Interval(low, high + (aged[1][1] + most[1] + UNIT * high) * SLACK)


class Model(block_model.Head):
    """A token's last activation and longest gap, in lists by its position."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.known: dict[int, tuple[int, int]] = {}

    def observe(self, number: int, group: list[block_model.Vector]) -> None:
        weights = self.weights(group, number)
        for token in self.tokens:
            last, gap = self.known.setdefault(token.position, (token.position - 1, 0))
            if weights.get(token.position, -1.0) >= self.config.alpha:
                self.known[token.position] = (number, max(gap, number - last))

    def finish(self, over_budget: bool, arrived: range) -> None:
        for token in self.tokens:
            last, gap = self.known[token.position]
            x = float(self.config.shifted) + (self.seen - 1 - last) / (gap + EPSILON)
            token.score = _sigmoid_of_minus(x) + (_sigmoid_of_minus(gap - 1.0) if gap else 0.0)

    def protected(self, positions: list[int]) -> set[int]:
        ordered = sorted(positions)
        return set(ordered[len(ordered) - min(self.config.recent, len(ordered)):])


def _sigmoid_of_minus(x: float) -> float:
    """2 sigmoid(-x)."""
    return 2 / (1 + math.exp(x)) if x < 700 else 0.0


class Adapter(blocks.Adapter):
    """Ranks are the importances. Last activations and gaps are whole numbers. They are exact unless a weight is so near
    alpha that either side of it is right; then they lie in an interval."""

    #: Of the tokens before the last eviction: their positions, and what is known of them.
    _known: tuple[Tensor, Activations] | None = None
    _scored: Interval | None = None

    def score_error(self, chunk: Chunk) -> Tensor:
        config, score = chunk.reference.config, chunk.before["score"].double()
        found = after(chunk, self._before(chunk))
        self._known = chunk.before["positions"], found
        self._scored = importances(found, chunk.reference.tokens_seen - 1, shifted=config.shifted)
        low, high = (end.where(chunk.before["occupied"], score) for end in self._scored)
        error = torch.maximum(high - score, score - low).nan_to_num(0).clamp_min(0)
        return error.masked_fill(~chunk.before["occupied"], 0)

    def _before(self, chunk: Chunk) -> Activations:
        """What is known of the chunk's tokens before its queries: a new token arrives one step after an activation."""
        positions = chunk.before["positions"]
        nothing = torch.zeros_like(positions)
        new = Activations(positions - 1, positions - 1, nothing, nothing)
        if self._known is None:
            return new
        then, known = self._known
        same = (positions[..., :, None] == then[..., None, :]) & (positions >= 0)[..., None]
        source = same.to(torch.int8).argmax(-1)
        return Activations(*(
            torch.where(same.any(-1), old.gather(-1, source), fresh) for old, fresh in zip(known, new, strict=True)
        ))

    def resume(self, tested: Any, reference: Any) -> None:
        carried = tested._carried
        reference._last, reference._gap = carried >> 32, carried & 0xFFFFFFFF
        last, gap = reference._last.clone(), reference._gap.clone()
        self._known = reference.positions.clone(), Activations(last, last, gap, gap)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        assert self._scored is not None
        return self._scored

    def ties(self, chunk: Chunk) -> Tensor:
        """Tokens whose activations are known and equal have the same importance in any arithmetic. A token that was
        never activated has an importance of exactly 0, since its exponent is at least 10^5."""
        assert self._known is not None
        found = self._known[1]
        sure = (found.first_last == found.last) & (found.least_gap == found.gap) & chunk.before["occupied"]
        index = torch.arange(chunk.slots, device=sure.device).expand(sure.shape)
        equal = sure[..., None, :] & sure[..., :, None]
        for one in (found.last.masked_fill(found.gap == 0, -2), found.gap):
            equal = equal & (one[..., :, None] == one[..., None, :])
        return torch.where(sure, index[..., None, :].where(equal, chunk.slots).amin(-1), index)

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        if self._known is not None:
            positions, found = self._known
            self._known = positions.index_select(0, index), Activations(*(one.index_select(0, index) for one in found))

    def reset(self) -> None:
        super().reset()
        self._known = None
