"""Checker of R-KV: what a similarity near the threshold leaves open, the bound of a score, and configs to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference import attention as eager
from ....reference.baselines import r_kv
from ...cases import draws
from ...cases.oracle import Attention
from .. import block_model
from ..bounds import DIVISION, EXP, SLACK, UNIT, Interval, gamma
from ..variants import BLOCKS, INTERVALS, ONE, variant
from . import blocks
from .blocks import Chunk, received_error
from .blocks import max_kept as max_kept

DEFAULTS = {
    "window": 8, "kernel_size": 7, "mix_lambda": 0.1, "threshold": 0.5, "exempts_first": True, "order": "position",
    "interval": 1, "block_size": 128, "softcap": None, "scale": None,
}
SMALL = {**blocks.SMALL, "window": 2, "kernel_size": 3}
LAWS: Sequence[dict[str, Any]] = ({"interval": 3, "block_size": 5},)
VARIANTS = (
    *BLOCKS, *INTERVALS,
    # Equal keys are as redundant as each other only up to rounding, so that scores decide nothing.
    variant("equal-keys-in-several-tiles", **ONE | {"group": 2}, content="duplicates", budget=70, prompt=75, steps=4),
    variant("keys-of-any-length", {"mix_lambda": 0.0, "window": 1, "kernel_size": 1}, content="long_keys",
            padding="none", dtype=torch.float32),
    variant("redundancy-alone", {"mix_lambda": 0.0, "exempts_first": False}, turns=((3, 2),)),
    variant("wide-window-and-pool", {"window": 4, "kernel_size": 5, "mix_lambda": 0.7}, budget=9, padding="random"),
    variant("low-threshold-and-interval", {"threshold": 0.1, "interval": 2, "window": 9}, steps=9),
    variant("order-of-scores", {"order": "score", "mix_lambda": 0.5}, budget=8, prompt=20, steps=12),
    variant("order-of-scores-and-interval", {"order": "score", "interval": 3, "threshold": 0.1, "block_size": 4},
            budget=9, steps=12, turns=((5, 4),)),
    # float32 and few tokens: one order that the bounds leave open leaves all later scores open.
    variant("order-of-scores-in-several-tiles", **ONE, budget=36, prompt=45, steps=6, dtype=torch.float32,
            options={"order": "score", "kernel_size": 5, "mix_lambda": 0.7, "threshold": 0.1}),
)
GROUPINGS = ({"interval": 3},)
COMPILED = ({"softcap": 2.0},)
SCORES_WHEN_DUE = True
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4, "window": 3, "kernel_size": 3},
    "a window beyond the budget": {"budget": 5, "block_size": 3, "window": 9, "kernel_size": 1},
    "redundancy alone": {"budget": 6, "block_size": 4, "window": 2, "mix_lambda": 0.0, "exempts_first": False},
    "once in four tokens": {"budget": 5, "block_size": 3, "window": 2, "kernel_size": 3, "interval": 4},
    "order of scores": {"budget": 7, "block_size": 2, "window": 2, "kernel_size": 3, "order": "score"},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "window": 0}, ValueError, "window must be at least 1"),
    ({"budget": 4, "kernel_size": 2}, ValueError, "kernel_size must be odd"),
    ({"budget": 4, "mix_lambda": 1.5}, ValueError, "mix_lambda must be from 0 to 1"),
    ({"budget": 4, "threshold": -0.1}, ValueError, "threshold must be from 0 to 1"),
    ({"budget": 4, "exempts_first": 1}, TypeError, "exempts_first must be a bool"),
    ({"budget": 4, "order": "age"}, ValueError, "order must be one of position, score"),
    ({"budget": 4, "interval": 0}, ValueError, "interval must be at least 1"),
]
_NOT_NUMBERS = (True, "0.1", None, torch.tensor(0.1))
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    *blocks.WINDOW_NUMBERS,
    ("mix_lambda", _NOT_NUMBERS, TypeError, "mix_lambda must be a float"),
    ("mix_lambda", (-0.1, 1.5, float("nan")), ValueError, "mix_lambda must be from 0 to 1, got"),
    ("threshold", _NOT_NUMBERS, TypeError, "threshold must be a float"),
    ("threshold", (-0.1, 1.5, float("inf")), ValueError, "threshold must be from 0 to 1, got"),
    ("exempts_first", (0, 1, None, "yes"), TypeError, "exempts_first must be a bool"),
    ("order", (True, None, 1), TypeError, "order must be a str"),
    ("order", ("", "Score", "scores"), ValueError, "order must be one of position, score, got"),
    *blocks.INTERVAL_NUMBERS,
]
#: A max pool gives neighbours the same importance, so that with a share of 1 nothing decides between them.
LAMBDAS, UNEQUAL = (0.1, 0.5, 0.07, 0.0, 1.0), (0.1, 0.5, 0.0)
SUBJECTS = ()
#: Of many equal tokens, sums of similarities in another order decide, so that any of them may be evicted.
TIED = ("duplicates",)


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package. A window of the whole budget leaves nothing to decide."""
    config = draw(blocks.block_configs(most))
    return {
        **config, "window": draw(draws.protected(config["budget"], window)),
        "kernel_size": draw(st.sampled_from((3, 1, 5, 7))),
        "mix_lambda": draw(st.sampled_from(draws.plain_among(LAMBDAS, UNEQUAL))),
        "threshold": draw(st.sampled_from((0.5, 0.2, 0.8, 0.0, 1.0))), "exempts_first": draw(st.booleans()),
        "order": draw(st.sampled_from(r_kv.ORDERS)), "interval": draw(blocks.INTERVALS),
    }


# The order of tokens --------------------------------------------------------------------------------------------------


def surely_before(chunk: Chunk) -> Tensor:
    """Whether the token in slot i comes before that in slot j whatever was rounded, [B, Hkv, S, S] bool at [..., i, j].

    Two scores of the last eviction whose intervals overlap leave their order open, and so do equal ones.
    """
    occupied, positions = chunk.before["occupied"], chunk.before["positions"]
    both = occupied[..., :, None] & occupied[..., None, :]
    older = positions[..., :, None] < positions[..., None, :]
    if chunk.reference.config.order == "position":
        return both & older
    earlier = chunk.reference._earlier.double()                                           # +inf: not scored then
    low, high, fresh = earlier - chunk.previous_error, earlier + chunk.previous_error, earlier == torch.inf
    either = torch.where(fresh[..., :, None], older, low[..., :, None] > high[..., None, :])
    return both & torch.where(fresh[..., :, None] == fresh[..., None, :], either, fresh[..., None, :])


# Similarities --------------------------------------------------------------------------------------------------------


def similarity(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """C [B, Hkv, S, S], 0 on the diagonal and where unoccupied, and |computed - true|.

    Each key is multiplied by a number that keeps its squares in range, and divided by its norm plus EPSILON. In the dot
    product of two keys, each term passes through at most D + 2 operations, c roundings each, and four more for the
    keys: gamma(c (D + 2) + 4) sum_d |k_id k_jd|. A norm sums D squares, which is half of gamma(D + 1); a square root,
    which is counted like a division, the addition of EPSILON and a division follow. Two norms and two products have a
    relative error of gamma(D + 9) and 4 DIVISION. Elements may flush to zero: below 2^-98 of a unit vector, since
    EPSILON is added to the norm.
    """
    key, occupied = chunk.before["key"].double(), chunk.before["occupied"]
    unit = r_kv.unit_keys(key, occupied)
    both = occupied[..., :, None] & occupied[..., None, :]
    both &= ~torch.eye(chunk.slots, dtype=torch.bool, device=key.device)
    found = (unit @ unit.transpose(-1, -2)).masked_fill(~both, 0)
    size, head_dim = unit.abs() @ unit.abs().transpose(-1, -2), key.shape[-1]
    error = gamma(chunk.allowed.dot * (head_dim + 2) + 4) * size
    error = error + found.abs() * gamma(head_dim + 9 + 4 * DIVISION / UNIT) + head_dim * 2.0**-90
    return found, (error * SLACK).masked_fill(~both, 0)


def mean_interval(chunk: Chunk) -> Interval:
    """Interval of the computed m_j, [B, Hkv, S].

    A similarity within its bound of the threshold, which is rounded once, may be above it or not. Row i is exempt at
    one of its candidates: a certain one, if it has only one option; otherwise each candidate may or may not count. Sums
    and differences of at most 2 n terms: gamma(2 n + 4); the bounds of the similarities count twice, since a term may
    be added and subtracted again; one division.
    """
    config, occupied, before = chunk.reference.config, chunk.before["occupied"], surely_before(chunk)
    found, error = similarity(chunk)
    both = occupied[..., :, None] & occupied[..., None, :]
    both &= ~torch.eye(chunk.slots, dtype=torch.bool, device=found.device)
    margin = error + UNIT * config.threshold * SLACK
    certain = both & (found - margin > config.threshold)
    possible = both & (found + margin > config.threshold)
    # A candidate surely comes before no token that is certainly similar. Counts of tokens are exact in float32.
    candidate = possible & (certain.float() @ before.float().mT == 0)
    no_other = ~certain.any(-1, keepdim=True)                                             # or no exemption
    if config.exempts_first:                     # the first token's own row may be exempt at itself: nothing changes
        first = occupied & ~before.any(-2)
        candidate = candidate | (no_other & first[..., None, :] & both)
        no_other = no_other & first[..., None]
    options = candidate.sum(-1, keepdim=True) + no_other
    left_out = found.where(candidate, 0)
    known = left_out.where(options == 1, 0).sum(-2)                                       # [B, Hkv, S]
    open_ = left_out.masked_fill(options == 1, 0)
    total, count = found.sum(-2) - known, occupied.sum(-1, keepdim=True).clamp_min(1)
    rounding = 2 * error.sum(-2) + 2 * gamma(2 * count + 4) * (found.abs().sum(-2) + error.sum(-2))
    low, high = total - open_.clamp_min(0).sum(-2) - rounding, total - open_.clamp_max(0).sum(-2) + rounding
    last = (DIVISION + UNIT) * SLACK
    return Interval((low - last * low.abs()) / count, (high + last * high.abs()) / count)


def redundancy_interval(chunk: Chunk) -> Interval:
    """Interval of the computed R_j, [B, Hkv, S]: it rises with m_j and falls with every other mean. Relative: an
    exponential of a difference of means, at most 2 in size, in numerator and sum, n additions and a division."""
    occupied, means = chunk.before["occupied"], mean_interval(chunk)
    least, most = (mean.exp().masked_fill(~occupied, 0) for mean in means)
    count = occupied.sum(-1, keepdim=True).clamp_min(1)
    relative = 2 * (EXP + 8 * UNIT) + gamma(count + 2) + DIVISION
    others_most, others_least = most.sum(-1, keepdim=True) - most, least.sum(-1, keepdim=True) - least
    low, high = (
        one / (one + others).masked_fill(~occupied, 1) for one, others in ((least, others_most), (most, others_least))
    )
    return Interval(low * (1 - relative * SLACK), high * (1 + relative * SLACK))


# Importance ----------------------------------------------------------------------------------------------------------


def window_attention(chunk: Chunk) -> Attention:
    """Exact attention of the window's queries to the tokens before it, one row per query: its logits are the largest of
    the group. The error of a maximum is at most the largest error."""
    state, before = chunk.reference, chunk.before
    heads, query, occupied = state.sizes.key_value_heads, state._window_query, before["occupied"]
    open_ = occupied & (before["positions"] < state.tokens_seen - state.config.observers)
    open_ = open_[:, :, None] & (state._window_positions >= 0)[:, None, :, None]          # [B, Hkv, W, S]

    def largest(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (heads, -1)).amax(2)

    logit = largest(eager.logits(query, before["key"], occupied, scale=state.scale)).masked_fill(~open_, -torch.inf)
    dot = largest(eager.logits(query.abs(), before["key"].abs(), occupied, scale=abs(state.scale)))
    return Attention(
        logit, dot.masked_fill(~open_, 0), eager.zero_unoccupied(before["value"], occupied), occupied, state.scale,
        chunk.dtype,
    ).capped(state.config.softcap)


def importance_interval(chunk: Chunk) -> Interval:
    """Interval of the computed pooled importance, [B, Hkv, S]; -inf in the window. `received_error`, and one division
    by the number of queries. A maximum does not round: it is at least that of the sure neighbours, and at most that of
    the possible ones."""
    state, before = chunk.reference, chunk.before
    attention = window_attention(chunk)
    observing = (state._window_positions >= 0).sum(-1).clamp_min(1)[:, None, None]
    error = received_error(attention, chunk.allowed)
    received = attention.weight.sum(2)
    error = (error + DIVISION * (received + error)) * SLACK / observing
    prefix = before["occupied"] & (before["positions"] < state.tokens_seen - state.config.observers)
    earlier = surely_before(chunk) & prefix[..., :, None] & prefix[..., None, :]
    first, last = earlier.sum(-2), prefix.sum(-1, keepdim=True) - 1 - earlier.sum(-1)     # possible places
    apart = last[..., :, None] - first[..., None, :]                                      # at most; negative: at least
    same, reach = torch.eye(chunk.slots, dtype=torch.bool, device=apart.device), state.config.kernel_size // 2

    def pooled(value: Tensor, near: Tensor) -> Tensor:
        value = value[..., None, :].where(near & prefix[..., None, :], -torch.inf).amax(-1)
        return value.masked_fill(~prefix, -torch.inf)

    sure = same | (torch.maximum(apart, apart.mT) <= reach)
    possible = same | (torch.maximum(-apart, -apart.mT) <= reach)
    low, high = (received / observing - error).clamp_min(0), received / observing + error
    return Interval(pooled(low, sure), pooled(high, possible))


class Model(block_model.Head):
    """A head over budget scores its tokens: lists of similarities, one exempt place per row, and the window's weights.
    """

    def finish(self, over_budget: bool, arrived: range) -> None:
        for token in self.tokens:
            token.score = math.inf if token.position in arrived else token.score
        if not over_budget:
            return
        repeated = self.repeated()
        prefix = [token.position for token in self._in_order() if token.position < self.seen - self.config.observers]
        important = self.important(prefix)
        share, reach = self.config.mix_lambda, self.config.kernel_size // 2
        for token in self.tokens:
            token.score = math.inf
            if token.position in important:
                at = prefix.index(token.position)
                near = max(important[position] for position in prefix[max(0, at - reach):at + reach + 1])
                token.score = share * near - (1 - share) * repeated[token.position]

    def _in_order(self) -> list[block_model.Token]:
        by_age = sorted(self.tokens, key=lambda token: token.position)
        if self.config.order == "position":
            return by_age
        return sorted(by_age, key=lambda token: math.inf if token.score == math.inf else -token.score)

    def repeated(self) -> dict[int, float]:
        """R by position."""
        tokens = self._in_order()
        units = []
        for token in tokens:
            norm = math.hypot(*token.key) + r_kv.EPSILON
            units.append([number / norm for number in token.key])
        rows = [[0.0 if a is b else math.fsum(map(float.__mul__, a, b)) for b in units] for a in units]
        for number, row in enumerate(rows):
            near = [j for j, similar in enumerate(row) if similar > self.config.threshold and j != number]
            if near:
                row[near[-1]] = 0.0
            elif self.config.exempts_first:
                row[0] = 0.0
        means = [math.fsum(column) / len(tokens) for column in zip(*rows, strict=True)]
        total = math.fsum(map(math.exp, means))
        return {token.position: math.exp(mean) / total for token, mean in zip(tokens, means, strict=True)}

    def important(self, prefix: list[int]) -> dict[int, float]:
        """I by position, of the tokens before the window."""
        keys = {token.position: token.key for token in self.tokens}
        found = dict.fromkeys(prefix, 0.0)
        asking = [entry for entry in self.window if entry is not None]
        for _, group in asking:
            logits = {
                position: max(self.logit(query, keys[position]) for query in group)
                for position in prefix
            }
            top = max(logits.values(), default=0.0)
            total = math.fsum(math.exp(logit - top) for logit in logits.values())
            for position, logit in logits.items():
                found[position] += math.exp(logit - top) / total / len(asking)
        return found

    def protected(self, positions: list[int]) -> set[int]:
        return {position for position in positions if position >= self.seen - self.config.observers}


class Adapter(blocks.Adapter):
    """Ranks are the scores of heads that are due. Heads that evict nothing keep their previous scores and bounds. A
    product, its factor and the difference round: 4 u of each part."""

    _scored: Interval | None = None  # of the chunk that is judged

    def score_error(self, chunk: Chunk) -> Tensor:
        share = chunk.reference.config.mix_lambda
        important, repeated = importance_interval(chunk), redundancy_interval(chunk)
        score, occupied = chunk.before["score"], chunk.before["occupied"]
        decided = occupied & chunk.over_budget[..., None] & score.isfinite()
        rounding = 4 * UNIT * (share * important.high.clamp_min(0) + (1 - share) * repeated.high)
        low = share * important.low.clamp_min(0) - (1 - share) * repeated.high - rounding
        high = share * important.high.clamp_min(0) - (1 - share) * repeated.low + rounding
        low, high = (torch.where(decided, end, score) for end in (low, high))
        error = torch.maximum(high - score, score - low).nan_to_num(0).clamp_min(0) * SLACK
        error = error.masked_fill(~decided, 0)
        self._scored = Interval(low, high)
        return torch.where(chunk.over_budget[..., None], error, chunk.previous_error)

    def resume(self, tested: Any, reference: Any) -> None:
        blocks.resume_window(tested, reference)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        assert self._scored is not None
        return self._scored

    def ties(self, chunk: Chunk) -> Tensor:
        return blocks.no_ties(chunk)
