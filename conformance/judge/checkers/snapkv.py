"""Checker of SnapKV: the bound of its window scores, the tokens of a prompt that it keeps, and its state, which scores
all tokens again after every block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ....reference import attention as eager
from ....reference import prompt_compression
from ....reference.baselines import snapkv
from ...cases import draws
from ...cases.block_cases import AttendCase
from ...cases.case import Case, WindowCase
from ...cases.oracle import Attention, upcast, upcast_all
from ...cases.strategies import WINDOW_LAYOUTS, window_cases
from .. import block_model, choices, recorded
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ..choices import Verdict, undecided
from ..compare import assert_dtype, assert_same, assert_within, gathered
from ..fields import field
from ..subjects import Subject, properties
from ..ties import tie_classes, window_ties
from ..variants import BLOCKS, INTERVALS, ONE, variant
from . import blocks, h2o
from .blocks import Chunk, received_error
from .blocks import max_kept as max_kept

CASES = (WindowCase, *blocks.ATTEND_CASES)
DEFAULTS = {"window": 32, "kernel_size": 5, "interval": 1, "block_size": 128, "softcap": None, "scale": None}
SAME = ("kernel_size",)
SMALL = {**blocks.SMALL, "window": 2, "kernel_size": 3}
#: Compresses after every third token: with blocks of five, some rows within the prompt and others later.
LAWS = ({"interval": 3, "block_size": 5},)
GROUPINGS = ({"interval": 3},)
#: In blocks, not as a whole prompt.
COMPILED = ({"softcap": 2.0, "sink_logits": True}, {"block_size": 2})
SCORES_WHEN_DUE = True


VARIANTS = (
    *BLOCKS, *INTERVALS,
    # The prompt's last block has fewer tokens than the window.
    variant("wide-window-and-pool", {"window": 5, "kernel_size": 11, "block_size": 8}, budget=12, prompt=27,
            padding="random"),
    variant("large-blocks", {"block_size": 149, "window": 140, "kernel_size": 7}, **ONE, budget=200, prompt=300,
            steps=1),
    variant("window-beyond-the-budget", {"window": 9, "kernel_size": 1, "interval": 2}, steps=9),
)


def score_error(attention: Attention, allowed: Arithmetic, *, kernel_size: int, shared_heads: bool) -> Tensor:
    """|computed - true| of SnapKV's window score, [B, T] with shared_heads, else [B, Hkv, T]; 0 for the window itself.

    attention: causal attention of the W window queries. A weight exp(s_j - lse) has the relative error
    `log_weight_error`. The mean over W queries and H heads and the pool over kernel_size tokens sum nonnegative terms:
    W + H + kernel_size additions and four divisions. Every weight and product may flush to zero: FLUSH each.
    """
    below, above = log_weight_error(attention, allowed)
    relative = torch.maximum(torch.expm1(above.clamp_max(300)), -torch.expm1(below))
    window, total = attention.logit.shape[2:]
    prefix = total - window
    observers = attention.occupied[:, prefix:].sum(-1).clamp_min(1)[:, None, None]
    heads = 1 if shared_heads else attention.key_value_heads
    shared = attention.query_heads // heads
    sums = gamma(window + shared + attention.key_value_heads + kernel_size + 4 * DIVISION / UNIT)
    error = attention.weight * (relative + sums * (1 + relative)) + 8 * FLUSH
    error = error.masked_fill(~attention.seen, 0).sum(2) / observers                      # [B, Hq, T]
    error = error.view(error.shape[0], heads, shared, total).mean(2)
    pooled = torch.zeros_like(error)
    if prefix:
        pooled[..., :prefix] = functional.avg_pool1d(
            error[..., :prefix], kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True
        )
        pooled[..., :prefix] += 4 * FLUSH
    pooled = (pooled * SLACK).masked_fill(~attention.occupied[:, None], 0)
    return pooled[:, 0] if shared_heads else pooled


def score_bound(case: Any, *, shared_heads: bool, allowed: Arithmetic | None = None) -> Tensor:
    """Bound of SnapKV's `window_score` for a WindowCase: [B, T] or [B, Hkv, T]."""
    attention = case.attention
    return score_error(
        attention, allowed or arithmetic(attention.dtype), kernel_size=case.kernel_size, shared_heads=shared_heads
    )


def assert_score_right(
    actual: Tensor, case: WindowCase, *, shared_heads: bool, allowed: Arithmetic | None = None
) -> None:
    """actual: `snapkv.window_score(**case.score_inputs, shared_heads=...)`."""
    truth = prompt_compression.score_prompt(**upcast_all(case.score_inputs), shared_heads=shared_heads)
    bound = score_bound(case, shared_heads=shared_heads, allowed=allowed)
    assert_within(actual, truth, bound, what="window score")


def assert_compress_right(
    actual: Any, case: WindowCase, *, shared_heads: bool = True, allowed: Arithmetic | None = None
) -> Verdict:
    """actual: `snapkv.compress(**case.snapkv_inputs, shared_heads=...)`, or `longflow.compress_prefill(**case.inputs)`
    (shared heads): key and value bit by bit what `kept` says, and kept a right choice."""
    key, value, kept = actual
    truth = prompt_compression.compress_prompt(**upcast_all(case.snapkv_inputs), shared_heads=shared_heads)
    verdict = undecided()
    with field("kept"):
        verdict = assert_kept_right(kept, truth.kept, case, shared_heads=shared_heads, allowed=allowed)
    for name, tensor, source in (("key", key, case.key), ("value", value, case.value)):
        with field(name):
            assert_dtype(tensor, case.dtype, what=f"compressed {name}")
            assert_same(tensor, gathered(source, kept), what=f"compressed {name}")
    return verdict


WINDOW_PROPERTIES = properties(
    tied=("identical", "equal_keys"), extreme=("overflow_88", "extreme_1e4", "all_below_104"), full="none",
    masked=("left_padding", "random", "one_token"), protect=("none", "newest", "random"), layout=WINDOW_LAYOUTS,
)


def _window_subjects(*, shared_heads: bool) -> Iterator[Subject]:
    """`window_score` and `compress` with one choice per KV head, or with `shared_heads`."""
    more = {"shared_heads": True} if shared_heads else {}

    def judge_score(actual: Tensor, case: WindowCase) -> None:
        with field("score"):
            assert_score_right(actual, case, shared_heads=shared_heads)

    def judge(actual: Any, case: WindowCase) -> Verdict:
        return assert_compress_right(actual, case, shared_heads=shared_heads)

    shared: dict[str, Any] = {"properties": WINDOW_PROPERTIES, "sized": "tokens", "variant": "-".join(more)}
    yield Subject("window_score", window_cases, judge_score, numbers=("score",),
                  inputs=lambda case: case.score_inputs | more, **shared)
    yield Subject("compress", window_cases, judge, numbers=("key", "value"), choices=("kept",),
                  inputs=lambda case: case.snapkv_inputs | more, recorded=recorded.windows, **shared)


def score_interval(case: WindowCase, *, shared_heads: bool, allowed: Arithmetic | None = None) -> Interval:
    """Interval of the computed window score of each token."""
    truth = prompt_compression.score_prompt(**upcast_all(case.score_inputs), shared_heads=shared_heads)
    bound = score_bound(case, shared_heads=shared_heads, allowed=allowed)
    return Interval(truth - bound, truth + bound)


def assert_kept_right(
    kept: Tensor, truth: Tensor, case: WindowCase, *, shared_heads: bool, allowed: Arithmetic | None = None,
    what: str = "kept",
) -> Verdict:
    """kept [B, N], or [B, Hkv, N] where each head chooses, of a compressed prompt."""
    occupied, protected = case.mask, case.protected
    tie = window_ties(case.key, occupied, case.observers, case.kernel_size, shared_heads=shared_heads)
    if not shared_heads:
        occupied = occupied[:, None].expand(tie.shape)
        protected = None if protected is None else protected[:, None].expand(tie.shape)
    return choices.assert_kept_right(
        kept, truth, score_interval(case, shared_heads=shared_heads, allowed=allowed),
        occupied=occupied, protected=protected, window=case.observers, tie=tie, what=what,
    )


# The state -----------------------------------------------------------------------------------------------------------

arguments, variants = h2o.arguments, h2o.variants
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4, "window": 3},
    "a window beyond the budget": {"budget": 5, "block_size": 3, "window": 9, "kernel_size": 1},
    "a window of one": {"budget": 4, "block_size": 5, "window": 1, "kernel_size": 7},
    "once in four tokens": {"budget": 4, "block_size": 3, "window": 2, "kernel_size": 3, "interval": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "window": 0}, ValueError, "window must be at least 1"),
    ({"budget": 4, "kernel_size": 2}, ValueError, "kernel_size must be odd"),
    ({"budget": 4, "interval": 0}, ValueError, "interval must be at least 1"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    *blocks.WINDOW_NUMBERS,
    *blocks.INTERVAL_NUMBERS,
]
TRACE = {"window": 16}


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package. A pool over the whole prefix would give all its tokens one score, with nothing to decide."""
    config = draw(blocks.block_configs(most))
    sizes = (3, 1, 5, 7) if config["budget"] > 5 else (1, 3) if config["budget"] > 2 else (1,)
    return {
        **config, "window": draw(draws.protected(config["budget"], window)),
        "kernel_size": draw(st.sampled_from(sizes)), "interval": draw(blocks.INTERVALS),
    }


def attend_error(case: AttendCase, allowed: Arithmetic) -> Tensor:
    """Bound of `attend(...).received`, [B, Hkv, S]: a mean over the valid queries."""
    return received_error(case.attention, allowed) / case.valid.sum(-1).clamp_min(1)[..., None]


SUBJECTS = (
    *_window_subjects(shared_heads=False), *_window_subjects(shared_heads=True),
    *blocks.attend_subjects("snapkv", snapkv.attend, attend_error),
)


def window_attention(chunk: Chunk) -> Attention:
    """Exact attention of the window's queries, which the reference stores, over all slots before eviction."""
    state, before = chunk.reference, chunk.before
    query, occupied = state._window_query, before["occupied"]
    future = before["positions"][:, :, None] > state._window_positions[:, None, :, None]      # [B, Hkv, W, S]
    future = future.repeat_interleave(chunk.group, 1)
    logit = eager.logits(query, before["key"], occupied, scale=state.scale).masked_fill(future, -torch.inf)
    dot = eager.logits(query.abs(), before["key"].abs(), occupied, scale=abs(state.scale))
    found = Attention(
        logit, dot.masked_fill(logit == -torch.inf, 0), eager.zero_unoccupied(before["value"], occupied), occupied,
        state.scale, chunk.dtype,
    ).capped(state.config.softcap)
    return replace(found, sink_logits=upcast(state.sink_logits))


class Model(block_model.Head):
    """A token's score is the pooled mean of the weights that the window's queries give it. With an interval it is
    recomputed only if the head is over budget."""

    def finish(self, over_budget: bool, arrived: range) -> None:
        if not over_budget and self.config.interval > 1:
            for token in self.tokens:
                token.score = math.inf if token.position in arrived else token.score
            return
        observing = [self.weights(group, number) for number, group in filter(None, self.window)]
        received = {
            token.position: math.fsum(weights.get(token.position, 0.0) for weights in observing)
            / max(1, len(observing)) for token in self.tokens
        }
        window = self.protected(list(received))
        prefix = sorted(received.keys() - window)
        reach = self.config.kernel_size // 2
        for token in self.tokens:
            if token.position in window:
                token.score = math.inf
                continue
            at = prefix.index(token.position)
            near = prefix[max(0, at - reach):at + reach + 1]
            token.score = math.fsum(received[position] for position in near) / self.config.kernel_size

    def protected(self, positions: list[int]) -> set[int]:
        return {position for position in positions if position >= self.seen - self.config.observers}


class Adapter(blocks.Adapter):
    """Ranks are the scores: the weights from the window's queries, averaged and pooled along the cached tokens in the
    order of their positions. The bound follows `score_error`: the sums of received_error and of the pool, one division
    each. With an interval, heads that evict nothing keep their previous scores and bounds."""

    def score_error(self, chunk: Chunk) -> Tensor:
        state, positions = chunk.reference, chunk.before["positions"]
        observing = (state._window_positions >= 0).sum(-1).clamp_min(1)[:, None, None]
        error = received_error(window_attention(chunk), chunk.allowed) / observing
        size, window = state.config.kernel_size, positions >= state.tokens_seen - state.config.observers
        error = self._pooled(error.masked_fill(window, 0), positions, size)
        score = chunk.before["score"]
        rest = ~chunk.before["occupied"] | window
        error = error + gamma(size + 2 * DIVISION / UNIT) * (score.masked_fill(rest, 0) + error) + 4 * FLUSH
        error = (error * SLACK).masked_fill(rest, 0)
        if state.config.interval == 1:
            return error
        return torch.where(chunk.over_budget[..., None], error, chunk.previous_error)

    def resume(self, tested: Any, reference: Any) -> None:
        blocks.resume_window(tested, reference)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        return Interval(chunk.before["rank"] - error, chunk.before["rank"] + error)

    def ties(self, chunk: Chunk) -> Tensor:
        """Two tokens tie if the keys within reach of the pool are bitwise equal one by one, in order of position. Next
        to the window and before the first token the pool adds 0."""
        config, before = chunk.reference.config, chunk.before
        positions, occupied = before["positions"], before["occupied"]
        names = blocks.equal_keys(chunk)
        window = positions >= chunk.reference.tokens_seen - config.observers
        place = positions.sort(dim=-1, stable=True).indices                                   # free slots come first
        names = names.masked_fill(window | ~occupied, -1).gather(-1, place)
        around = functional.pad(names, (config.kernel_size // 2,) * 2, value=-1).unfold(-1, config.kernel_size, 1)
        around = torch.empty_like(around).scatter(2, place[..., None].expand(around.shape), around).contiguous()
        return tie_classes(around, torch.ones_like(around), occupied, per_head=True)

    @staticmethod
    def _pooled(tensor: Tensor, positions: Tensor, size: int) -> Tensor:
        """Average pool of [B, Hkv, S] along the tokens in order of position."""
        place = positions.sort(dim=-1, stable=True).indices
        in_order = functional.avg_pool1d(tensor.gather(-1, place), size, stride=1, padding=size // 2)
        return torch.empty_like(tensor).scatter(-1, place, in_order)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    if isinstance(case, AttendCase):
        yield from blocks.replay_attend(case, module, "snapkv", snapkv.attend, attend_error)
        return
    assert isinstance(case, WindowCase)
    if case.prefix_alone:  # LongFlow's
        return
    for shared in (True, False):
        assert_score_right(module.window_score(**case.score_inputs, shared_heads=shared), case, shared_heads=shared)
        assert_compress_right(
            module.compress(**case.snapkv_inputs, shared_heads=shared), case, shared_heads=shared
        )
        yield f"window_score and compress, shared_heads={shared}: right"
