"""SnapKV judged: the bound of its window scores, which tokens of a prompt it keeps, and its state, which does it anew
after every block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ....reference import attention as eager
from ....reference.baselines import snapkv
from .. import compare
from ...cases.block_cases import AttendCase
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ...cases.case import Case, WindowCase
from ..compare import Verdict, assert_same, assert_within, fail, gathered
from ..oracle import Attention, upcast_all
from ..ties import tie_classes, window_ties
from . import blocks, h2o
from .blocks import Piece, received_error

CASES = (WindowCase, AttendCase)
SMALL = {**blocks.SMALL, "window": 2, "kernel_size": 3}
#: Compressed once in three tokens: with blocks of five, some rows in the prompt, others later.
LAWS = ({"interval": 3, "block_size": 5},)
GROUPINGS = ({"interval": 3},)


def score_error(attention: Attention, allowed: Arithmetic, *, kernel_size: int, shared_heads: bool) -> Tensor:
    """|computed - true| of SnapKV's window score, [B, T] with shared_heads, else [B, Hkv, T]; 0 for the window itself.

    attention of the W window queries, causal. A weight exp(s_j - lse) carries `log_weight_error` relatively; mean over
    W queries and H heads and the pool over kernel_size tokens are sums of nonnegative terms: W + H + kernel_size
    additions and four divisions. Every weight and product may flush: FLUSH each.
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
    truth = snapkv.window_score(**upcast_all(case.score_inputs), shared_heads=shared_heads)
    bound = score_bound(case, shared_heads=shared_heads, allowed=allowed)
    assert_within(actual, truth, bound, what="window score")


def assert_compress_right(
    actual: Any, case: WindowCase, *, shared_heads: bool = True, allowed: Arithmetic | None = None
) -> Verdict:
    """actual: `snapkv.compress(**case.snapkv_inputs, shared_heads=...)`, or `longflow.compress_prefill(**case.inputs)`
    (shared heads): key and value bit by bit what `kept` says, and kept a right choice."""
    key, value, kept = actual
    truth = snapkv.compress(**upcast_all(case.snapkv_inputs), shared_heads=shared_heads)
    verdict = assert_kept_right(kept, truth.kept, case, shared_heads=shared_heads, allowed=allowed)
    for name, tensor, source in (("key", key, case.key), ("value", value, case.value)):
        if tensor.dtype != case.dtype:
            fail(f"compressed {name} must be {case.dtype}, got {tensor.dtype}")
        assert_same(tensor, gathered(source, kept), what=f"compressed {name}")
    return verdict


def score_interval(case: WindowCase, *, shared_heads: bool, allowed: Arithmetic | None = None) -> Interval:
    """Where the computed window score of each token may lie."""
    truth = snapkv.window_score(**upcast_all(case.score_inputs), shared_heads=shared_heads)
    bound = score_bound(case, shared_heads=shared_heads, allowed=allowed)
    return Interval(truth - bound, truth + bound)


def assert_kept_right(
    kept: Tensor, truth: Tensor, case: WindowCase, *, shared_heads: bool, allowed: Arithmetic | None = None,
    what: str = "kept",
) -> Verdict:
    """kept [B, N], or [B, Hkv, N] where heads choose for themselves, of a compressed prompt."""
    occupied, protected = case.mask, case.protected
    tie = window_ties(case.key, occupied, case.observers, case.kernel_size, shared_heads=shared_heads)
    if not shared_heads:
        occupied = occupied[:, None].expand(tie.shape)
        protected = None if protected is None else protected[:, None].expand(tie.shape)
    return compare.assert_kept_right(
        kept, truth, score_interval(case, shared_heads=shared_heads, allowed=allowed),
        occupied=occupied, protected=protected, window=case.observers, tie=tie, what=what,
    )


# The state -----------------------------------------------------------------------------------------------------------

arguments = h2o.arguments
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
TRACE = {"window": 16}


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package. A pool that reaches over the whole prefix gives all of it one sum, and nothing to judge."""
    frame = draw(blocks.frames(most))
    sizes = (3, 1, 5, 7) if frame["budget"] > 5 else (1, 3) if frame["budget"] > 2 else (1,)
    return {
        **frame, "window": draw(st.integers(1, window)), "kernel_size": draw(st.sampled_from(sizes)),
        "interval": draw(st.sampled_from((1, 3, 2, 5))),
    }


def most_held(state: Any, tokens: int) -> int:
    """See the package."""
    return min(state.config.capacity, tokens)


def attend_error(case: AttendCase, allowed: Arithmetic) -> Tensor:
    """Bound of `attend(...).received`, [B, Hkv, S]: a mean over the queries that are real."""
    return received_error(case.attention, allowed) / case.real.sum(-1).clamp_min(1)[..., None]


def window_attention(piece: Piece) -> Attention:
    """The exact attention of the last tokens' queries, which the reference keeps, over all slots, before eviction."""
    state, before = piece.reference, piece.before
    query, occupied = state._window_query, before["occupied"]
    future = before["positions"][:, :, None] > state._window_positions[:, None, :, None]      # [B, Hkv, W, S]
    future = future.repeat_interleave(piece.group, 1)
    logit = eager.logits(query, before["key"], occupied, scale=state.scale).masked_fill(future, -torch.inf)
    dot = eager.logits(query.abs(), before["key"].abs(), occupied, scale=abs(state.scale))
    return Attention(
        logit, dot.masked_fill(logit == -torch.inf, 0), eager.zero_unoccupied(before["value"], occupied), occupied,
        state.scale, piece.dtype,
    )


class Adapter(blocks.Adapter):
    """Ranks are the scores: what the window's queries give, averaged and pooled along the tokens held, in the order of
    their positions. The bound is `score_error`'s: the sums of received_error, the pool's, one division each. With an
    interval, heads that evict nothing have the scores of the last time, and their bounds."""

    def score_error(self, piece: Piece) -> Tensor:
        state, positions = piece.reference, piece.before["positions"]
        observing = (state._window_positions >= 0).sum(-1).clamp_min(1)[:, None, None]
        error = received_error(window_attention(piece), piece.allowed) / observing
        size, window = state.config.kernel_size, positions >= state.tokens_seen - state.config.observers
        error = self._pooled(error.masked_fill(window, 0), positions, size)
        score = piece.before["score"]
        rest = ~piece.before["occupied"] | window
        error = error + gamma(size + 2 * DIVISION / UNIT) * (score.masked_fill(rest, 0) + error) + 4 * FLUSH
        error = (error * SLACK).masked_fill(rest, 0)
        return error if state.config.interval == 1 else torch.where(piece.due[..., None], error, piece.carried)

    def rank_interval(self, piece: Piece, error: Tensor) -> Interval:
        return Interval(piece.before["rank"] - error, piece.before["rank"] + error)

    def ties(self, piece: Piece) -> Tensor:
        """Tokens tie whose neighbours in reach of the pool, in order of position, have bitwise equal keys in turn; next
        to the window and before the first token the pool adds 0."""
        config, before = piece.reference.config, piece.before
        positions, occupied = before["positions"], before["occupied"]
        names = blocks.equal_keys(piece)
        window = positions >= piece.reference.tokens_seen - config.observers
        place = positions.sort(dim=-1, stable=True).indices                                   # free slots come first
        names = names.masked_fill(window | ~occupied, -1).gather(-1, place)
        around = functional.pad(names, (config.kernel_size // 2,) * 2, value=-1).unfold(-1, config.kernel_size, 1)
        around = torch.empty_like(around).scatter(2, place[..., None].expand(around.shape), around).contiguous()
        return tie_classes(around, torch.ones_like(around), occupied, per_head=True)

    @staticmethod
    def _pooled(tensor: Tensor, positions: Tensor, size: int) -> Tensor:
        """The average pool of [B, Hkv, S] along the order of positions."""
        place = positions.sort(dim=-1, stable=True).indices
        in_order = functional.avg_pool1d(tensor.gather(-1, place), size, stride=1, padding=size // 2)
        return torch.empty_like(tensor).scatter(-1, place, in_order)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    if isinstance(case, AttendCase):
        yield from blocks.replay_attend(case, module, "snapkv", snapkv.attend, attend_error)
        return
    assert isinstance(case, WindowCase)
    for shared in (True, False):
        assert_score_right(module.window_score(**case.score_inputs, shared_heads=shared), case, shared_heads=shared)
        assert_compress_right(
            module.compress(**case.snapkv_inputs, shared_heads=shared), case, shared_heads=shared
        )
        yield f"window_score and compress, shared_heads={shared}: right"
