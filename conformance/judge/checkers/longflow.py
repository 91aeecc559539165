"""Checker of LongFlow: bounds of its scores, its choice of a slot, its state, and configs to draw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference import longflow
from ....reference.attention import per_query_head
from ...cases import draws
from ...cases.case import Case, DecodeCase, WindowCase
from ...cases.contents import OCCUPANCIES, PROTECTIONS
from ...cases.fp8_cases import Fp8Case, fp8_cases, fp8_variants
from ...cases.in_pages import (
    PAGED,
    InPages,
    PagedDecodeCase,
    PagedFp8Case,
    paged_decode_cases,
    paged_fp8_cases,
    with_pages,
)
from ...cases.layouts import LAYOUTS
from ...cases.oracle import Attention, oracle
from ...cases.strategies import decode_cases, window_cases
from .. import bounds, lockstep, recorded
from ..bounds import DIVISION, EXP, FLUSH, LOG, SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ..choices import Verdict, assert_eviction_right, undecided
from ..compare import assert_dtype, assert_same, assert_within
from ..fields import field
from ..fp8_subjects import Fp8Subject
from ..subjects import EXTREME, TIED, Subject, properties
from ..ties import tie_classes
from ..variants import ONE, variant
from . import snapkv

CASES = (DecodeCase, Fp8Case, PagedDecodeCase, PagedFp8Case)
#: SnapKV for the prompt (section 4.1), as its authors run it. Eq. 3, i < t, protects the newest token.
DEFAULTS = {
    "window": 32, "kernel_size": 5, "prefix_alone": False, "protect_newest": True, "per_head": False, "sinks": 0,
    "check_finite": False, "softcap": None, "scale": None,
}
SAME = ("window", "kernel_size", "prefix_alone", "per_head", "check_finite")
#: Options that change the shapes of a state.
GROUPINGS = ({"per_head": True},)
#: See the package.
COMPILED = ({"softcap": 2.0}, {"softcap": 2.0, "sink_logits": True})

VARIANTS = (
    variant("per-head-with-sinks", {"per_head": True, "sinks": 2, "protect_newest": True}, reorder_at=2, reset_at=-1),
    variant("per-head-in-pages", {"per_head": True}, pages=4, long=False),
    variant("pages-of-several-tiles", **ONE, pages=64, budget=150, prompt=159, steps=3),
    variant("pages-with-sinks", {"sinks": 1, "protect_newest": False}, pages=3, padding="random"),
    variant("fewer-tokens-than-sinks", {"sinks": 5}, budget=9, prompt=4, steps=10, long=False),
    variant("rows-with-fewer-tokens-than-sinks", {"sinks": 3, "window": 3}, budget=7, prompt=16, steps=9, batch=3),
    variant("wide-window-and-pool", {"window": 9, "kernel_size": 7}, prompt=24, padding="random", budget=12),
    variant("window-beyond-the-prompt", {"window": 32, "kernel_size": 1, "per_head": True}, prompt=20),
    # Steep and wide, so that most rows would keep other tokens with the softmax over all.
    variant("prompt-softmax-over-the-prefix", {"prefix_alone": True, "window": 12, "kernel_size": 1}, batch=8,
            key_value_heads=2, prompt=60, padding="random", budget=36, steps=2, scale=1.5),
    # Of logits below, about and far beyond it.
    variant("softcapped-logits", {"softcap": 2.0, "window": 3}, padding="random", scale=-4.0, long=False),
    variant("softcapped-logits-per-head-in-pages", {"softcap": 1.5, "per_head": True}, pages=4, scale=1.0,
            dtype=torch.bfloat16),
    variant("attention-sinks", {"sinks": 1, "window": 3}, sink_logits=True, padding="random", scale=1.0, long=False),
    variant("attention-sinks-per-head", {"per_head": True}, sink_logits=True, padding="random", scale=1.0,
            dtype=torch.bfloat16),
    # Of several tiles, which programs may share.
    variant("attention-sinks-and-a-softcap", {"softcap": 1.5}, **ONE | {"key_value_heads": 2, "group": 3},
            sink_logits=True, scale=1.0, prompt=159, budget=150, steps=3),
    variant("attention-sinks-and-a-softcap-over-the-prefix", {"softcap": 1.5, "prefix_alone": True, "window": 12},
            sink_logits=True, prompt=60, padding="random", budget=36, steps=2, scale=1.5),
)


# Bounds --------------------------------------------------------------------------------------------------------------


def log_score_interval(attention: Attention, allowed: Arithmetic, *, per_head: bool) -> Interval:
    """Interval of the computed log score of each slot: logsumexp over heads h of log a_hj + log ||v_j||_1.

    attention: of one query (Q = 1). Returns [B, S], or [B, Hkv, S] per head; -inf where unoccupied or v_j = 0.
    - log a_hj: `log_weight_error`.
    - N_j = ||v_j||_1: D absolute values with c roundings each, as tensor cores may sum them, gamma(c D), and FLUSH for
      each subnormal one, so the lower end can be -inf. Its logarithm: LOG max(1, |log2 N_j|).
    - x_hj = log a_hj + log N_j, added in one sum or per KV head: 4 u (|log a_hj| + |log N_j|). Or log N_j is added to
      s_j before the maximum and the normaliser's logarithm are subtracted: three roundings of numbers up to
      |s_j| + |m| + |log N_j|, which the four in delta_j and these four cover.
      The scale of FP8 values is one more rounding of each value, or of N_j.
    - the logsumexp over H heads, with a running maximum over them, or within the group and then over KV heads: each
      head passes through at most H + 1 exponentials and products (its own, and one wherever the maximum rises;
      G + Hkv <= H + 1), H additions, two logarithms of at most H (one within the group), and roundings of arguments:
      4 u (|x_hj| + |X_j|), with X_j the result.
    The error of x_hj counts in proportion to head h's share of the sum.
    """
    log_weight = (attention.logit - attention.lse)[:, :, 0]                              # [B, Hq, S]
    seen = attention.seen[:, :, 0]
    log_weight = log_weight.masked_fill(~seen, 0)
    below, above = (error[:, :, 0] for error in log_weight_error(attention, allowed))
    norm, scaled = attention.magnitude, attention.scales is not None
    relative = gamma(allowed.dot * attention.head_dim + scaled) + attention.head_dim * FLUSH / norm.clamp_min(1e-300)
    relative = relative * SLACK
    log_norm = norm.log()                                                                 # -inf for a zero value
    size = per_query_head(log_norm.abs().masked_fill(norm == 0, 0), attention.query_heads)
    loss = per_query_head(torch.log1p(-relative.clamp_max(1)), attention.query_heads)
    gain = per_query_head(torch.log1p(relative), attention.query_heads)
    term = log_weight + per_query_head(log_norm, attention.query_heads)
    rounding = LOG * (1 + size) + 4 * UNIT * (log_weight.abs() + size)
    rounding = rounding + 4 * UNIT * term.abs().masked_fill(term.isinf(), 0)
    low, high = term + below + loss - rounding, term + above + gain + rounding

    batch, heads, slots = attention.value.shape[0], attention.key_value_heads if per_head else 1, term.shape[-1]
    shared = attention.query_heads // heads
    total, low, high = (
        x.masked_fill(~seen, -torch.inf).view(batch, heads, shared, slots).logsumexp(2) for x in (term, low, high)
    )
    common = (shared + 1) * (EXP + UNIT) + gamma(shared) + 2 * LOG * (1 + math.log(shared))
    common = common + 4 * UNIT * total.abs().masked_fill(total.isinf(), 0)
    low, high = low - common * SLACK, high + common * SLACK
    return Interval(low, high) if per_head else Interval(low[:, 0], high[:, 0])


def linear_score_error(attention: Attention, allowed: Arithmetic, *, per_head: bool) -> Tensor:
    """|computed - true| of the linear score, mean_h a_hj ||v_j||_1 / D: [B, S], or [B, Hkv, S] per head.

    It may be computed as the exponential of the log score. So it has the relative error of the log score, one more
    exponential, the division by H D (a constant: DIVISION and two roundings), and FLUSH for the result, for each weight
    before its product with ||v_j||_1 / D, and for each product, which the scale of FP8 values may follow.
    """
    low, high = log_score_interval(attention, allowed, per_head=per_head)
    heads = attention.key_value_heads if per_head else 1
    shared = attention.query_heads // heads
    divisor = shared * attention.head_dim
    contribution = attention.weight[:, :, 0] * per_query_head(attention.magnitude, attention.query_heads)
    batch, _, slots = contribution.shape
    score = contribution.view(batch, heads, shared, slots).sum(2) / divisor
    size = per_query_head(attention.magnitude, attention.query_heads).view(batch, heads, shared, slots).sum(2) / divisor
    last = EXP + DIVISION + 2 * UNIT
    low, high = ((x if per_head else x[:, None]).exp() / divisor for x in (low, high))
    error = torch.maximum(high * (1 + last) - score, score - low * (1 - last)).clamp_min(0)
    _, value_scale = attention.scales or (1.0, 1.0)
    error = error * SLACK + FLUSH * (size + (shared + 2) * max(1.0, value_scale))
    return error if per_head else error[:, 0]


def score_bound(case: Any, allowed: Arithmetic | None = None) -> Tensor:
    """Bound of LongFlow's linear score, shaped like it; 0 for unoccupied and protected slots (their +-inf is exact)."""
    attention = case.attention
    error = linear_score_error(attention, allowed or arithmetic(attention.dtype), per_head=case.per_head)
    error = error.masked_fill(~case.occupied, 0)
    return error if case.protected is None else error.masked_fill(case.protected, 0)


def rank_interval(case: Any, allowed: Arithmetic | None = None) -> Interval:
    """Interval of the computed log score, by which LongFlow evicts: [B, S] or [B, Hkv, S]."""
    attention = case.attention
    return log_score_interval(attention, allowed or arithmetic(attention.dtype), per_head=case.per_head)


# Verdicts ------------------------------------------------------------------------------------------------------------


def assert_decode_right(actual: Any, case: DecodeCase, *, allowed: Arithmetic | None = None) -> Verdict:
    """actual: `decode_attention(**case.inputs)` of the implementation under test: output, score, slot."""
    truth = oracle(longflow.decode_attention, case)
    output, score, slot = actual
    with field("output"):
        assert_dtype(output, case.dtype, what="output")
        assert_within(output, truth.output, bounds.decode_output(case, allowed), what="output")
    with field("score"):
        assert_dtype(score, torch.float32, what="score")
        assert_within(score, truth.score, score_bound(case, allowed), what="score")
    verdict = undecided()
    with field("slot"):
        verdict = assert_slot_right(slot, case, truth=truth.slot, allowed=allowed)
    return verdict


def assert_slot_right(
    slot: Tensor, case: DecodeCase, *, truth: Tensor | None = None, allowed: Arithmetic | None = None
) -> Verdict:
    """Check the slot that LongFlow overwrites next, in the log domain."""
    return assert_eviction_right(
        slot, oracle(longflow.decode_attention, case).slot if truth is None else truth,
        rank_interval(case, allowed), occupied=case.occupied, protected=case.protected,
        tie=tie_classes(case.key, case.value, case.occupied, per_head=case.per_head),
    )


#: Scores of these contents lie apart.
SCORED_CONTENTS = ("ordinary", "dominant")


def _decoding(made: type[Subject], name: str, cases: Any, *, paged: bool, **more: Any) -> Subject:
    """A subject of a decode step."""
    if paged:
        more |= {"inputs": lambda case: case.paged_inputs, "arguments": with_pages, "also": True}
    return made(
        name, cases, assert_decode_right, numbers=("output", "score"), choices=("slot",), **more, properties=properties(
            ordinary=SCORED_CONTENTS, tied=(*TIED, "zero_values"), extreme=EXTREME, masked=OCCUPANCIES[1:],
            protect=PROTECTIONS, layout=PAGED if paged else LAYOUTS, paged=paged,
        ),
    )


_COMPRESSION: dict[str, Any] = {
    "name": "compress_prefill", "judge": snapkv.assert_compress_right, "numbers": ("key", "value"),
    "choices": ("kept",), "properties": snapkv.WINDOW_PROPERTIES, "sized": "tokens",
}
SUBJECTS = (
    _decoding(Subject, "decode_attention", decode_cases, paged=False, recorded=recorded.decode_steps),
    _decoding(Fp8Subject, "decode_attention", fp8_cases, paged=False),
    _decoding(Subject, "paged_decode_attention", paged_decode_cases, paged=True),
    _decoding(Fp8Subject, "paged_decode_attention", paged_fp8_cases, paged=True),
    Subject(cases=window_cases, recorded=recorded.windows, **_COMPRESSION),
    Subject(cases=partial(window_cases, prefix_alone=True), variant="prefix_alone", also=True, **_COMPRESSION),
)


def variants(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """See the package: FP8 keys and values, with scales and without."""
    return fp8_variants(given) if name in ("decode_attention", "paged_decode_attention") else []


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    assert isinstance(case, DecodeCase)
    if isinstance(case, InPages):
        assert_decode_right(module.paged_decode_attention(**with_pages(case.paged_inputs)), case)
        yield "paged_decode_attention: right"
        return
    assert_decode_right(module.decode_attention(**case.inputs), case)
    yield "decode_attention: right"


# The state -----------------------------------------------------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    budget, protect_newest = draw(draws.budgets(most)), draw(st.booleans())
    # The config rejects protected tokens that fill the budget.
    spare = budget - 1 - (protect_newest and budget > 1)
    return {
        "budget": budget, "protect_newest": protect_newest, "sinks": draw(st.integers(0, max(0, min(3, spare)))),
        "per_head": draw(st.booleans()), "window": draw(st.integers(1, window)),
        "kernel_size": draw(st.sampled_from((5, 1, 3, 7))), "prefix_alone": draw(st.booleans()),
    }


class Adapter(lockstep.Adapter):
    """Checks scores and the next slot against `decode_attention` on the state's own slots.

    The protected tokens are derived from positions, the config and the prompt's padding.
    """

    exact: tuple[str, ...] = ("next_slot",)
    any_slot_order = True

    def __init__(self, allowed: Arithmetic | None = None) -> None:
        self.allowed = allowed
        self.sink_end: Tensor | None = None

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        config, occupied = reference.config, prompt["occupied"]
        self.sink_end = _sink_end(config.sinks, occupied)
        tokens, target = occupied.shape[1], config.budget - 1
        if tokens <= target:
            return None
        observers = prompt["query"][:, :, -config.window:]
        observers = observers.masked_fill(~occupied[:, None, -observers.shape[2]:, None], 0)
        sinks = occupied & (torch.arange(tokens, device=occupied.device) < self.sink_end[:, None])
        case = WindowCase.of(
            observers, prompt["key"], prompt["value"], budget=target, kernel_size=config.kernel_size,
            occupied=occupied, protected=sinks, scale=config.scale, prefix_alone=config.prefix_alone,
            softcap=config.softcap, sink_logits=None if config.prefix_alone else reference.sink_logits,
        )
        # The prompt is compressed for all heads together, even if each head evicts alone later.
        kept, right = (_shared(state.positions)[:, :target] for state in (tested, reference))
        if config.per_head:
            assert_same(tested.positions, tested.positions[:, :1].expand_as(tested.positions),
                        what="positions after the prompt, by head (expected the same tokens in all heads)")
        verdict = snapkv.assert_kept_right(
            kept, right, case, shared_heads=True, allowed=self.allowed, what="tokens kept of the prompt"
        )
        if bool((kept != right).any()):
            lockstep.adopt_prompt(reference, kept, prompt["key"], prompt["value"])
        return verdict

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        config, protected = reference.config, self._protected(reference)
        case = DecodeCase.of(
            query, tested.key, tested.value, reference.occupied,
            protected=protected, scale=config.scale, per_head=config.per_head,
        ).changed(**lockstep.changes_of(reference))
        with field("score"):
            assert_within(tested.score, reference.score, score_bound(case, self.allowed), what="score of the last step")
        verdict = assert_slot_right(
            tested.next_slot, case, truth=reference.next_slot, allowed=self.allowed,
        )
        reference.next_slot = tested.next_slot.clone()
        return bounds.decode_output(case, self.allowed), verdict

    def reorder(self, index: Tensor) -> None:
        if self.sink_end is not None:
            self.sink_end = self.sink_end.index_select(0, index)

    def reset(self) -> None:
        self.sink_end = None

    def _protected(self, state: Any) -> Tensor:
        """Sinks, and the newest token if the config protects it. Called after a step, whose token is the newest."""
        positions, config = state.positions, state.config
        end = self.sink_end
        if end is None:
            end = torch.full(positions.shape[:1], config.sinks, device=positions.device)
        protected = state.occupied & (positions < end.view(-1, *[1] * (positions.dim() - 1)))
        if config.protect_newest:
            protected = protected | (positions == state.tokens_seen - 1)
        return protected


def _sink_end(sinks: int, occupied: Tensor) -> Tensor:
    """One past the position of each row's last sink, [B]. Sinks are the first `sinks` tokens of the prompt that are not
    padding; if it has fewer, also the tokens after it."""
    ends = []
    for row in occupied:
        present = row.nonzero()[:sinks, 0].tolist()
        missing = sinks - len(present)
        ends.append(len(row) + missing if missing else present[-1] + 1 if present else 0)
    return torch.tensor(ends, device=occupied.device)


def _shared(positions: Tensor) -> Tensor:
    return positions[:, 0] if positions.dim() == 3 else positions
