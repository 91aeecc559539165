"""Comparators of numbers: outputs and scores against the truth, within a bound or exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...reference.contract.scales import FP8
from .. import capabilities, stats
from .mismatch import UNBOUNDED, first, unravel
from .mismatch import Fail as Fail
from .mismatch import JudgeError as JudgeError
from .mismatch import Mismatch as Mismatch
from .mismatch import WrongTie as WrongTie
from .mismatch import fail as fail
from .mismatch import fail_oracle as fail_oracle


def assert_within(actual: Tensor, truth: Tensor, bound: Tensor, *, what: str = "result") -> float:
    """Assert |actual - truth| <= bound in every element. Infinities must be equal; NaN never passes.

    actual: any floating dtype; truth: the oracle's float64; bound: like truth, >= 0. Returns the utilisation, the
    largest error as a fraction of its bound (0 where a bound of 0 is met), and records it in stats.
    """
    if tuple(actual.shape) != tuple(truth.shape):
        fail(f"{what}: expected shape {tuple(truth.shape)}, got {tuple(actual.shape)}")
    if truth.numel() == 0:
        return 0.0
    bound = bound.expand(truth.shape)
    if not bool((bound >= 0).all()):
        raise JudgeError(f"{what}: every bound must be >= 0, got {bound.min().item()}")
    if bool(truth.isnan().any()):
        raise JudgeError(f"{what}: the truth is NaN at {first(truth.isnan())}, expected a number")
    actual = actual.double()
    if capabilities.current().free_score == "any":
        actual = torch.where(truth == -torch.inf, truth, actual)  # of what has no score
    infinite = truth.isinf()
    # inf - inf is NaN, so infinities are compared for equality.
    error = (actual - truth).abs().masked_fill(infinite & (actual == truth), 0)
    fraction = torch.where(error == 0, 0, error / bound)
    # Not error > bound: NaN compares false. An infinite bound (logits beyond all precision) accepts any number.
    wrong = ~(error <= bound) | (infinite & (actual != truth)) | (~infinite & ~actual.isfinite())
    if bool(wrong.any()):
        # Report NaN first, then the largest error relative to its bound.
        badness = fraction.masked_fill(fraction.isnan(), torch.inf).masked_fill(~wrong, -1)
        at = unravel(int(badness.argmax()), truth.shape)
        stats.record_drift(float(badness[at]))
        fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are beyond their bound; the worst, at {at}: "
            f"expected {truth[at].item()!r}, got {actual[at].item()!r}"
            f"{_excess(error[at].item(), bound[at].item())}",
            of_bound=float(badness[at]), unbounded=_unbounded(float(badness[at]), actual[at].item()),
        )
    used = float(fraction.max())
    stats.utilisation(used)
    if stats.current() is not None:
        stats.elements(int((bound.isfinite() & ~infinite).sum()))
    return used


def _unbounded(of_bound: float, actual: float) -> str | None:
    """Why an error is no finite multiple of its bound; None if it is one."""
    if math.isfinite(of_bound):
        return None
    nan, infinite, not_exact = UNBOUNDED
    return nan if math.isnan(actual) else infinite if math.isinf(actual) else not_exact


def _excess(error: float, bound: float) -> str:
    """How far an error exceeds its bound, as the second line of a message; nothing where the error is not finite."""
    if not math.isfinite(error):
        return ""
    ratio = f": {error / bound:.4g} times the bound" if bound else ""
    return f"\n  error {error:.6g}, bound {bound:.6g}{ratio}"


def assert_dtype(actual: Tensor, expected: torch.dtype, *, what: str) -> None:
    """Assert the dtype of a result."""
    if actual.dtype != expected:
        fail(f"{what}: expected dtype {expected}, got {actual.dtype}".replace("torch.", ""))


def assert_same(actual: Tensor, expected: Tensor, *, what: str, where: Tensor | None = None) -> None:
    """Assert equal shapes and exactly equal elements (those under the mask `where`, which broadcasts).

    NaN equals NaN, since this compares copies, not results. The dtypes may differ in precision.
    """
    stats.exact()
    if tuple(actual.shape) != tuple(expected.shape):
        fail(f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    if actual.is_floating_point() or expected.is_floating_point():
        actual, expected = actual.double(), expected.double()
        wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    else:
        wrong = actual != expected
    if where is not None:
        wrong = wrong & where
    if bool(wrong.any()):
        at = first(wrong)
        fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; the first, at {at}: "
            f"expected {expected[at].item()!r}, got {actual[at].item()!r}"
        )
    if actual.is_floating_point() and stats.current() is not None:
        stats.elements(wrong.numel() if where is None else int(where.expand_as(wrong).sum()))


def named(tokens: Tensor, slots: int) -> Tensor:
    """The slots [..., S] bool that tokens [..., N] name; what is no slot, such as -1, names none."""
    found = torch.zeros(*tokens.shape[:-1], slots + 1, dtype=torch.bool, device=tokens.device)
    return found.scatter_(-1, tokens.where((tokens >= 0) & (tokens < slots), slots).long(), True)[..., :-1]


def gathered(tensor: Tensor, kept: Tensor) -> Tensor:
    """tensor [B, Hkv, T, D] at kept [B, N] or [B, Hkv, N]; -1 gives zeros."""
    if tensor.dtype in FP8:  # torch gathers none
        return gathered(tensor.view(torch.uint8), kept).view(tensor.dtype)
    batch, heads, _, head_dim = tensor.shape
    index = (kept if kept.dim() == 3 else kept[:, None]).expand(batch, heads, -1)
    rows = tensor.gather(2, index.clamp_min(0)[..., None].expand(-1, -1, -1, head_dim))
    return rows.masked_fill(index[..., None] < 0, 0)
