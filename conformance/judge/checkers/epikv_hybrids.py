"""Checker of EpiKV's hybrid policies: accumulated attention weights, and the thought types of segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....reference.contract.epikv.config import EpiKVConfig
from ... import stats
from ...cases.case import DecodeCase
from ...cases.oracle import Attention, attend
from ...cases.thought_cases import SparsityCase
from ..bounds import (
    DIVISION,
    FLUSH,
    LOG,
    SLACK,
    UNIT,
    Arithmetic,
    Interval,
    arithmetic,
    gamma,
    log_weight_error,
)
from ..compare import assert_same, fail
from . import blocks
from .thinkv_thoughts import share_interval

#: Thought types by rising sparsity: execution, reasoning, transition; by rising entropy, the reverse.
RISING = {"sparsity": (1, 2, 0), "entropy": (0, 2, 1)}


def received_attention(attention: Attention) -> tuple[Tensor, Tensor]:
    """The attention weight that each token receives, averaged over all query heads [B, S], and |computed - true|.

    `blocks.received_error` bounds the mean over a group. The mean over the Hkv groups, or over all Hq heads at once,
    adds at most Hq additions and a division; the mean over layers, of which there is one here, another division.
    """
    each, error = blocks.received_attention(attention), blocks.received_error(attention, arithmetic(attention.dtype))
    total, off = each.mean(1), error.mean(1)
    return total, (off + (gamma(attention.query_heads) + 2 * DIVISION) * (total + off)) * SLACK


class Sums:
    """The sums A_j of all tokens so far, by position [B, N], float64, and their error bounds."""

    def __init__(self) -> None:
        self.exact: Tensor | None = None
        self.error: Tensor | None = None

    def arrive(self, occupied: Tensor) -> None:
        """Add new tokens [B, n] with sums of 0."""
        more = torch.zeros(occupied.shape, dtype=torch.float64, device=occupied.device)
        self.exact, self.error = (
            more if tensor is None else torch.cat((tensor, more), 1) for tensor in (self.exact, self.error)
        )

    def prompt(self, prompt: dict[str, Tensor], scale: float) -> None:
        """Set the sums to the weights from a prompt's queries."""
        tokens = (prompt[name] for name in ("query", "key", "value", "occupied"))
        self.exact, self.error = received_attention(attend(*tokens, scale=scale, causal=True))

    def step(self, attention: Attention, positions: Tensor) -> None:
        """Add the weights from a step's query to the tokens in slots, positions [B, S]: one rounding per sum."""
        assert self.exact is not None
        assert self.error is not None
        more, off = received_attention(attention)
        more, off = (x.masked_fill(positions < 0, 0) for x in (more, off))
        place = positions.clamp_min(0)
        self.exact = self.exact.scatter_add(1, place, more)
        error = self.error.scatter_add(1, place, off)
        grown = torch.zeros_like(error).scatter_add(1, place, (positions >= 0).double())
        self.error = error + grown * UNIT * (self.exact + error) * SLACK

    def added(self, own: Interval) -> Interval:
        """Intervals of the scores [B, N], the sums plus the frozen part `own`: one rounding."""
        assert self.exact is not None
        assert self.error is not None
        low, high = own.low + self.exact - self.error, own.high + self.exact + self.error
        return Interval(low - UNIT * SLACK * low.abs().nan_to_num(posinf=0), high + UNIT * SLACK
                        * high.abs().nan_to_num(posinf=0))

    def reorder(self, index: Tensor) -> None:
        if self.exact is not None and self.error is not None:
            self.exact, self.error = self.exact.index_select(0, index), self.error.index_select(0, index)


def entropy_interval(attention: Attention, allowed: Arithmetic | None = None) -> Interval:
    """Interval of `relative_entropy`, [B]: the mean over Hq heads of -sum_j a_j log a_j over n tokens, divided by
    log n; 0 if n = 1.

    A term is a weight times its logarithm, which may be computed apart, from the logits or from the weight: both have
    the errors of `log_weight_error`, and the logarithm of a weight adds LOG (1 + |log a_j|). So the term lies between
    the products of the ends. With the logits, the terms are a_j (m - s_j), and log l is added once rather than in every
    term. Since the weights sum to 1 up to gamma(n + 1) + DIVISION, this is another relative error of log l, which does
    not exceed the entropy; all terms are at least 0, so errors are relative to their sum. Roundings: the product, a
    quotient, a sum over n tokens, one over Hq heads, and a division by Hq times log n, whose own error is LOG for
    n >= 2; the mean over layers, of which there is one here, a division. Weights below FLUSH, times a logarithm of at
    most 88, may be 0.
    """
    low, high = log_weight_error(attention, allowed or arithmetic(attention.dtype))
    exact = (attention.logit - attention.lse).masked_fill(~attention.seen, 0)             # [B, Hq, 1, S]
    more = LOG * (1 + exact.abs()) * SLACK
    low, high = exact + low - more, exact + high + more
    least, most = (
        (torch.where(log >= 0, one.exp(), other.exp()) * -log).masked_fill(~attention.seen, 0).sum(-1)[..., 0]
        for log, one, other in ((high, high, low), (low, low, high))
    )                                                                                     # [B, Hq]
    count, heads = attention.count[..., 0, 0], attention.query_heads                      # [B, Hq]
    relative = (gamma(2 * count[:, 0] + heads + 6) + 3 * DIVISION + LOG) * SLACK
    flushed = 100 * FLUSH * count
    full = count[:, 0].clamp_min(2).log()
    least, most = ((total + side).mean(1) / full for total, side in ((least, -flushed), (most, flushed)))
    single = count[:, 0] == 1
    return Interval(
        (least - relative * least.abs()).masked_fill(single, 0), (most + relative * most.abs()).masked_fill(single, 0)
    )


def assert_thoughts_right(tested: Any, reference: Any, case: DecodeCase, when: str) -> None:
    """Check the thought types of all tokens after a step. The reference adopts a type that the bounds of the segment's
    sparsity or entropy allow."""
    config, attention = reference.config, reference.scorer.attention
    assert isinstance(config, EpiKVConfig)
    assert config.edges is not None
    newest = reference.positions == reference.tokens_seen - 1                           # [B, S], one each
    if tuple(tested.thoughts.shape) != tuple(newest.shape) or tested.thoughts.dtype != torch.int64:
        fail(f"thoughts {when}: expected int64 of shape {tuple(newest.shape)}, got {tested.thoughts.dtype} of "
             f"{tuple(tested.thoughts.shape)}")
    thought = tested.thoughts[newest]
    if (attention._decoded - 1) % config.tau == 0:
        if config.segments_by == "entropy":
            low, high = entropy_interval(case.attention)
        else:
            sparsity = SparsityCase.given(
                case.query, case.key, case.occupied, threshold=config.sparsity_threshold, scale=reference.scale
            )
            (low, high), _ = share_interval(sparsity)
        # Edges are rounded to float32, and the mean over one layer is a division.
        margin, types = DIVISION + 2 * UNIT, RISING[config.segments_by]
        low, high = low - margin * low.abs(), high + margin * high.abs()
        edges = torch.tensor(config.edges, dtype=torch.float64, device=low.device)
        least, most = ((end[:, None] >= edges).sum(1) for end in (low, high))
        known = (thought >= 0) & (thought <= 2)
        place = torch.tensor(types, device=thought.device).argsort()[thought.where(known, 0)].where(known, -1)
        wrong = (place < least) | (place > most)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            fail(
                f"thought {when}: row {row}, of {config.segments_by} {low[row].item()!r} to {high[row].item()!r}: "
                f"expected one of {sorted({types[int(least[row])], types[int(most[row])]})}, got {thought[row].item()}"
            )
        stats.adjudicate(int((thought != attention.thought).sum()))
        attention.thought = thought.clone()
        attention.thoughts = torch.where(newest, thought[:, None], attention.thoughts)
    assert_same(tested.thoughts, attention.thoughts, what=f"thoughts {when}")
