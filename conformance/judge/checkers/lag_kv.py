"""Checker of LagKV: which ranks the arithmetic of a chunk's scores leaves open, and configs to draw."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines import lag_kv
from ...cases import draws
from .. import block_model
from ..bounds import DIVISION, EXP, LOG, SLACK, UNIT, Interval, gamma
from ..compare import fail
from ..ties import tie_classes
from ..variants import BLOCKS, INTERVALS, variant
from . import blocks
from .blocks import Chunk
from .blocks import max_kept as max_kept

REQUIRED = {"lag": 2}
SMALL = {**blocks.SMALL, "lag": 1}
DEFAULTS = {"sinks": 0, "interval": 1, "block_size": 128, "softcap": None, "scale": None}
TRACE = {"lag": 16, "sinks": 4}


def small(budget: int) -> dict[str, Any]:
    """See the package: the longest chunks."""
    return {"lag": (budget + 1) // 2}


LAWS = ({"interval": 3, "block_size": 5},)
VARIANTS = (
    *BLOCKS, *INTERVALS,
    variant("sinks", {"lag": 3, "sinks": 2}, budget=9, prompt=20, turns=((3, 2),)),
    variant("narrow-channels", {"lag": 3}, content="narrow_values", budget=9, prompt=20, dtype=torch.float32),
    variant("chunks-of-one", {"lag": 1, "interval": 2}, steps=9),
    variant("chunks-in-several-periods", {"lag": 2, "sinks": 1, "interval": 3}, steps=16, padding="random"),
)
GROUPINGS = ({"interval": 3},)
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4, "lag": 2},
    "two sinks": {"budget": 9, "block_size": 4, "lag": 3, "sinks": 2},
    "chunks of one token": {"budget": 4, "block_size": 3, "lag": 1},
    "once in four tokens": {"budget": 5, "block_size": 3, "lag": 2, "interval": 4, "sinks": 1},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "lag": None}, TypeError, "lag must be an int"),
    ({"budget": 4, "lag": 3}, ValueError, "must be at most budget = 4, got 0 [+] 2 [*] 3 - 1 = 5"),
    ({"budget": 4, "lag": 2, "sinks": 2}, ValueError, "must be at most budget = 4, got 2 [+] 2 [*] 2 - 1 = 5"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("lag", blocks.NOT_INTEGERS, TypeError, "lag must be an int"),
    ("lag", (0, -1), ValueError, "lag must be at least 1"),
    ("lag", (3,), ValueError, r"sinks \+ 2 \* lag - 1 must be at most budget = 4, got 0 \+ 2 \* 3 - 1 = 5"),
    ("sinks", blocks.NOT_INTEGERS, TypeError, "sinks must be an int"),
    ("sinks", (-1,), ValueError, "sinks must be at least 0"),
    ("sinks", (2,), ValueError, r"must be at most budget = 4, got 2 \+ 2 \* 2 - 1 = 5"),
    *blocks.INTERVAL_NUMBERS,
]
SUBJECTS = ()


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package. Long chunks and many sinks leave few tokens to choose from, and chunks of one token no ranks."""
    config = draw(blocks.block_configs(most))
    longest = (config["budget"] + 1) // 2
    least = min(2, longest)
    several = st.integers(least, max(least, min(longest, most // 3)))
    lag = draw(several if draws.plain_only() else several | st.just(1))
    sinks = draw(st.integers(0, min(1 if draws.plain_only() else 3, config["budget"] + 1 - 2 * lag)))
    return {**config, "lag": lag, "sinks": sinks, "interval": draw(blocks.INTERVALS)}


# Scores --------------------------------------------------------------------------------------------------------------


def spread_error(tokens: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """`spread` [..., C] in float64, and |computed - true| in float32.

    A scaled channel y is a quotient of two differences, and its difference from the mean rounds: together they move the
    vector of centred channels by at most a. The mean is a sum of D channels, and is divided. Its error e, the same in
    all channels, is orthogonal to the centred channels, which sum to 0. So a norm n becomes at most
    sqrt((n + a)^2 + (a + e)^2). D squares are summed and divided; the root halves their relative error, and counts like
    a division. Ranges of the next chunk below 2^-126, which may flush to zero, are not covered.
    """
    head_dim = tokens.shape[-1]
    low, high = following.amin(-2, keepdim=True), following.amax(-2, keepdim=True)
    width = high - low
    scaled = torch.where(width > 0, (tokens - low) / width.where(width > 0, 1.0), 0.0)
    centred = scaled - scaled.mean(-1, keepdim=True)
    norm = centred.norm(dim=-1)
    moved = (scaled.abs() * (2 * UNIT + DIVISION) + centred.abs() * UNIT).norm(dim=-1)
    of_mean = scaled.abs().mean(-1) * (gamma(head_dim) + DIVISION) * math.sqrt(head_dim)
    error = (torch.hypot(norm + moved, moved + of_mean) - norm) / math.sqrt(head_dim - 1)
    found = lag_kv.spread(tokens, following)
    return found, (error + (found + error) * (gamma(head_dim) / 2 + 1.5 * DIVISION)) * SLACK


def score_interval(key: Tensor, value: Tensor) -> Interval:
    """Interval of the computed `log_score` of a chunk, [..., C]. key, value [..., 2 C, D] float64.

    The logarithm of the sum of C exponentials moves at most as much as the largest spread does. Each exponential has an
    error of its own, and its exponent x has one of 4 u |x|, which counts in proportion to its share of the sum. C - 1
    additions, a logarithm and two roundings of the result follow. The logarithm of a softmax is then a difference. The
    logarithm of the sum of both softmaxes moves at most as much as one of them; an exponential, a logarithm and four
    roundings follow.
    """
    lag = key.shape[-2] // 2
    parts = [spread_error(*tensor.split(lag, -2)) for tensor in (key, value)]
    sums = gamma(lag) + EXP + LOG * (1 + math.log(lag))

    def of_softmax(found: Tensor, error: Tensor) -> Tensor:
        total = found.logsumexp(-1, keepdim=True)
        below = found.amax(-1, keepdim=True) - found
        exponents = 4 * UNIT * (found.softmax(-1) * below).sum(-1, keepdim=True)
        of_total = error.amax(-1, keepdim=True) + sums + exponents + 2 * UNIT * total.abs()
        return error + of_total + 4 * UNIT * (found - total).abs()

    truth = lag_kv.log_score(key, value)
    error = torch.maximum(*(of_softmax(*part) for part in parts)) + EXP + LOG + 4 * UNIT * (1 + truth.abs())
    return Interval(truth - error * SLACK, truth + error * SLACK)


def rank_interval(key: Tensor, value: Tensor) -> Interval:
    """The ranks of a chunk's tokens that computed scores allow: [..., C] float64. Of tokens with equal keys and values,
    the earlier one has the lower rank. key, value [H, 2 C, D] float64."""
    lag = key.shape[-2] // 2
    score = score_interval(key, value)
    tokens = key[None, :, :lag], value[None, :, :lag]
    # `tie_classes` takes all values of zero for a tie, which they are not here: both are passed as keys.
    bits = torch.cat(tokens, -1)
    tie = tie_classes(bits, torch.ones_like(bits), torch.ones_like(bits[..., 0], dtype=torch.bool), per_head=True)[0]
    equal = tie[..., :, None] == tie[..., None, :]                                        # [H, C, C]: i, j
    order = torch.arange(lag, device=key.device)
    earlier = order[None, :] < order[:, None]
    below = torch.where(equal, earlier, score.high[..., None, :] < score.low[..., :, None])
    above = torch.where(equal, ~earlier, score.low[..., None, :] > score.high[..., :, None])
    above = above & ~torch.eye(lag, dtype=torch.bool, device=key.device)
    return Interval(below.sum(-1).double(), (lag - 1 - above.sum(-1)).double())


class Model(block_model.Head):
    """Chunks of tokens in a list, by arrival."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arrived: list[int] = []
        self.ranked = 0

    def finish(self, over_budget: bool, arrived: range) -> None:
        lag, sinks = self.config.lag, self.config.sinks
        known = {token.position: token for token in self.tokens}
        for position in arrived:
            if position in known:
                known[position].score = float(lag)
                self.arrived.append(position)
        while len(self.arrived) >= sinks + (self.ranked + 2) * lag:
            first = sinks + self.ranked * lag
            both = [known[position] for position in self.arrived[first:first + 2 * lag]]
            for rank, token in enumerate(self.by_score(both[:lag], both[lag:])):
                token.score = float(rank)
            self.ranked += 1

    @staticmethod
    def by_score(chunk: list[block_model.Token], following: list[block_model.Token]) -> list[block_model.Token]:
        """The chunk's tokens, the lowest score first. Of equal ones the earlier is first: sorted() is stable."""
        shares = []
        for name in ("key", "value"):
            ranges = [(min(c), max(c)) for c in zip(*(getattr(token, name) for token in following), strict=True)]
            spreads = [
                statistics.stdev([
                    (x - low) / (high - low) if high > low else 0.0
                    for x, (low, high) in zip(getattr(token, name), ranges, strict=True)
                ])
                for token in chunk
            ]
            top = max(spreads)
            total = math.fsum(math.exp(spread - top) for spread in spreads)
            shares.append([spread - top - math.log(total) for spread in spreads])
        scores = [max(pair) + math.log1p(math.exp(min(pair) - max(pair))) for pair in zip(*shares, strict=True)]
        return [token for _, token in sorted(zip(scores, chunk, strict=True), key=lambda pair: pair[0])]

    def rank(self, token: block_model.Token) -> Any:
        return token.score, token.position

    def protected(self, positions: list[int]) -> set[int]:
        return {token.position for token in self.tokens if token.score == self.config.lag}


class Adapter(blocks.Adapter):
    """Ranks are whole numbers. They are exact unless scores of a chunk are so near that any order of them is right;
    then a rank lies in an interval. Positions decide between equal ones."""

    def score_error(self, chunk: Chunk) -> Tensor:
        reference, before = chunk.reference, chunk.before
        config, seen = reference.config, reference._valid_seen
        error = chunk.previous_error.clone()
        for row, (now, then) in enumerate(zip(seen.tolist(), (seen - before["valid"].sum(1)).tolist(), strict=True)):
            done, todo = (max(0, (tokens - config.sinks) // config.lag - 1) for tokens in (then, now))
            for number in range(done, todo):
                first = config.sinks + number * config.lag
                tokens = torch.arange(first, first + 2 * config.lag, device=error.device)
                index = before["_index"][row].where(before["occupied"][row], -1)
                slot = (index[:, None] == tokens[:, None]).to(torch.int8).argmax(-1)
                at = slot[..., None].expand(-1, -1, reference.sizes.head_dim)
                allowed = rank_interval(*(before[name][row].double().gather(1, at) for name in ("key", "value")))
                own = slot[:, :config.lag]
                rank = before["score"][row].double().gather(1, own)
                error[row].scatter_(1, own, torch.maximum(allowed.high - rank, rank - allowed.low).to(error.dtype))
        return error

    def _judge(self, tested: Any, reference: Any, dtype: torch.dtype, when: str) -> Tensor:
        """Also check that the ranks are whole numbers, and that no two tokens of a chunk have the same one."""
        bound = super()._judge(tested, reference, dtype, when)
        config, score = reference.config, tested.score.double()
        number = (reference._index - config.sinks) // config.lag
        ranked = reference.occupied & (reference._index >= config.sinks)
        ranked &= number < reference._ranked_chunks()[:, None, None]
        code = (number * config.lag + score.nan_to_num()).masked_fill(~ranked, -1)
        same = (code[..., :, None] == code[..., None, :]) & ranked[..., None]
        if bool((same.sum(-1) > 1).any()) or bool((ranked & (score != score.round())).any()):
            fail(f"score {when}: ranks must be whole numbers, each of another token of the chunk: {tested.score}")
        return bound

    def resume(self, tested: Any, reference: Any) -> None:
        reference._index = tested._token_index.long().masked_fill(~reference.occupied, -1)
        reference._valid_seen = tested._valid_seen[:, 0].long()

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        rank = chunk.before["rank"].double()
        return Interval(rank - error * 2**31, rank + error * 2**31)

    def ties(self, chunk: Chunk) -> Tensor:
        return blocks.no_ties(chunk)
