"""SnapKV's prompt compression judged: the bound of its window scores, and which tokens it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...reference.baselines import snapkv
from .. import compare
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ..cases import Case, WindowCase
from ..compare import Verdict, assert_same, assert_within, fail, gathered
from ..oracle import Attention, upcast_all
from ..ties import window_ties

CASES = (WindowCase,)


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


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    assert isinstance(case, WindowCase)
    for shared in (True, False):
        assert_score_right(module.window_score(**case.score_inputs, shared_heads=shared), case, shared_heads=shared)
        assert_compress_right(
            module.compress(**case.snapkv_inputs, shared_heads=shared), case, shared_heads=shared
        )
        yield f"window_score and compress, shared_heads={shared}: right"
