"""How far correct arithmetic may be from the truth: a priori error bounds, derived, with no tolerance in them.

The model. Inputs are float32, float16 or bfloat16 and taken as exact. Everything in between is float32: every
operation rounds, fl(a op b) = (a op b)(1 + e) with |e| <= u = 2^-24, in any order of summation, fused or not, and may
take numbers below 2^-126, results and values, for zero. On top of that hardware may

- truncate in tensor cores, so that a dot product of 16-bit inputs loses 2u per addition (c = 2, else c = 1);
- approximate exp2 to 2^-22 relative (PTX ex2.approx), log2 to 2^-22 absolute for results within [-1, 1], else
  relative (lg2.approx), and division to 2 ulp (div.full): EXP, LOG, DIVISION below;
- cast the weights P to the value's 16-bit type before P @ V (u_P), and does round the output to it (u_out).

A softmax may be blocked: a running maximum, and a factor exp(m_old - m_new) wherever it rises. A rise costs one
exponential and one multiplication. Blocks have at least `block` = 16 slots, what a tensor core takes at the least.
gamma(n) = n u / (1 - n u) bounds n roundings in a row: |prod (1 + e_i) - 1| <= gamma(n).

What follows is exact in the large terms (differences of exponentials, not their linearisation), so it stays true for
logits of 1e4, where a weight may be off by percents. Not covered, and not drawn: intermediate overflow of float32.
The oracle's own float64 error is below 2^-25 of each bound; SLACK pays for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.attention import per_query_head
from .oracle import Attention, attend

UNIT = 2.0**-24
FLUSH = 2.0**-126
EXP = 2.0**-22
LOG = 2.0**-22
DIVISION = 4 * UNIT
SLACK = 1 + 2.0**-20

#: Unit roundoff, and the absolute error of rounding to the smallest numbers, of the types an output may have.
UNITS = {torch.float32: UNIT, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float32: FLUSH, torch.float16: 2.0**-25, torch.bfloat16: FLUSH}


class Interval(NamedTuple):
    """Where a computed score may lie: low <= score <= high, tensors of the scores' shape; -inf is a score too."""

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that an implementation is allowed, for inputs of `dtype`. `weight_dtype`: what P is cast to."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    block: int = 16

    @property
    def dot(self) -> int:
        """c: rounding errors per addition of a dot product."""
        return 1 if self.dtype == torch.float32 else 2

    def rises(self, attention: Attention) -> Tensor:
        """R: how often a running maximum can rise after a slot went in, [B, Hq, Q, 1]: once per later block, once more
        where splits are combined, and never more often than there are slots."""
        blocks = math.ceil(attention.logit.shape[-1] / self.block) + 1
        return attention.count.clamp_max(blocks)


def arithmetic(dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None, block: int = 16) -> Arithmetic:
    """What we allow for inputs of `dtype`: P may be cast to that type, unless `weight_dtype` says that it is not."""
    return Arithmetic(dtype, weight_dtype or dtype, block)


def gamma(count: Tensor | float) -> Any:
    """n u / (1 - n u): the relative error of n roundings in a row."""
    return count * UNIT / (1 - count * UNIT)


def logit_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """delta_j [B, Hq, Q, S]: |computed s_j - s_j|, as an exponent's argument: everything up to the exponential.

    s_j = scale * q . k_j. The dot product: a term meets at most D roundings, products included, c of them each; two
    more for the scale (itself rounded, in base 2 with log2(e) in it) and its product: gamma(c (D + 2)) * |scale| sum_d
    |q_d k_jd|. Subtracting the maximum, or the log-sum-exp as two parts or one, converting between bases: at most four
    roundings of numbers no larger than |s_j| + |m| (rescalings telescope: m - m_1 + m_1 - m_2 + ... rounds no more
    than u (m - s_j) in all): 4 u (|s_j| + |m|). Products that underflow: FLUSH each.
    """
    logit = attention.logit.masked_fill(~attention.seen, 0)
    terms = allowed.dot * (attention.head_dim + 2)
    error = gamma(terms) * attention.dot + 4 * UNIT * (logit.abs() + attention.top.abs())
    return (error + terms * FLUSH * (abs(attention.scale) + 1)).masked_fill(~attention.seen, 0)


class WeightError(NamedTuple):
    """Errors of softmax weights. tau, below, above: bounds of logarithms, [B, Hq, Q, S] (denominators [B, Hq, Q, 1]).

    absolute: |computed a_j - a_j|, without underflow (that is FLUSH), for weights divided by their own sum.
    """

    tau: Tensor
    absolute: Tensor
    denominator_below: Tensor
    denominator_above: Tensor


def weight_error(attention: Attention, allowed: Arithmetic) -> WeightError:
    """rho_j a_j, the error of a_j = softmax(s)_j: from delta_j, the exponentials, the sum and the division.

    The computed exponential is exp(s_j - m) exp(t_j), |t_j| <= tau_j = delta_j + (1 + R) (EXP + u): one exponential
    and up to R rescalings, each an exponential and a product. What the maximum m is cancels. So the computed weight
    is a_j exp(t_j) / sum_i a_i exp(t_i), up to gamma(n + 1) of the sum over the n slots seen and DIVISION. It grows
    with t_j and falls with every other t_i, so the extremes are at t_j = +-tau_j, t_i = -+tau_i:

        up_j   =  tau_j - log(a_j e^tau_j  + sum_{i != j} a_i e^-tau_i) + g
        down_j = -tau_j - log(a_j e^-tau_j + sum_{i != j} a_i e^tau_i)  - g,   g = gamma(n + 1) + DIVISION

    as errors of log a_j. This is the max and the average of the deltas in one: a lone dominant token has no error but
    g. No weight exceeds e^g.
    """
    weight, seen = attention.weight, attention.seen
    tau = logit_error(attention, allowed) + (1 + allowed.rises(attention)) * (EXP + UNIT) * SLACK
    # Beyond e^300 a bound says nothing anyhow (no weight exceeds e^g); inf - inf must not come of it.
    tau = tau.masked_fill(~seen, 0).clamp_max(300)
    grown, shrunk = weight * tau.exp(), weight * (-tau).exp()
    least, most = shrunk.sum(-1, keepdim=True), grown.sum(-1, keepdim=True)
    # 1 stands in for the empty row.
    least, most = (total.masked_fill(total == 0, 1) for total in (least, most))
    last = (gamma(attention.count + 1) + DIVISION) * SLACK
    up = tau - (least - shrunk + grown).log() + last
    down = -tau - (most - grown + shrunk).log() - last
    high = torch.minimum(weight * up.exp(), last.exp())
    absolute = torch.maximum(high - weight, weight * -torch.expm1(down)).clamp_min(0)
    return WeightError(tau, absolute.masked_fill(~seen, 0), least.log() - last, most.log() + last)


def output_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """Attention output [B, Hq, Q, D]: sum_j a_j |v_jd| (rho_j + u_P + gamma(c n)) + u_out |o_d|, and underflow.

    Each term of sum_j a_j v_jd carries its weight's error, the cast of P (u_P; to float16 also 2^-25 absolute, half
    its smallest number, since P <= 1), and at most n roundings as product and sum over the n slots seen, c each.
    Absolute: exponentials, rescaled sums and casts below FLUSH vanish (four FLUSH of each |v_jd|), as do products and
    sums below it (four FLUSH per slot). The last rounding, to the output's type, is of the computed number.
    """
    error = weight_error(attention, allowed).absolute
    unit, tiny = 0.0, 4 * FLUSH
    if allowed.weight_dtype != torch.float32:
        unit = UNITS[allowed.weight_dtype]
    if allowed.weight_dtype == torch.float16:
        tiny += TINY[torch.float16]
    sums = gamma(allowed.dot * attention.count)
    per_weight = error + (unit + sums * (1 + unit)) * (attention.weight + error)
    values = per_query_head(attention.value.abs(), attention.query_heads)                 # [B, Hq, S, D]
    total = (per_weight + tiny * attention.seen) @ values + 4 * FLUSH * attention.count
    total = (total + UNITS[allowed.dtype] * (attention.output.abs() + total) + TINY[allowed.dtype]) * SLACK
    # A query that sees nothing has an output of exact zeros.
    return total.masked_fill(~attention.seen.any(-1, keepdim=True), 0)


def log_weight_error(attention: Attention, allowed: Arithmetic) -> Interval:
    """Errors of log a_hj = s_j - lse, or of a_hj = exp(s_j - lse) relative, as (below <= 0, above >= 0), [B, Hq, Q, S].

    Numerator and normaliser err independently here, since logits may be stored, or made twice: tau_j from the one and
    the weighted average of e^+-tau_i from the other, plus the logarithm of the sum, LOG max(1, log2(l)), and roundings
    of lse = m + log l and of the difference beyond those in delta_j: with log l = lse - m, 6 u (lse - m) + LOG.
    """
    errors = weight_error(attention, allowed)
    spread = attention.lse - attention.top
    extra = errors.tau + (LOG * (1 + spread) + 6 * UNIT * spread) * SLACK
    return Interval(-(extra + errors.denominator_above), extra - errors.denominator_below)


def decode_output(case: Any, allowed: Arithmetic | None = None) -> Tensor:
    """Bound of `decode_attention(...).output`, [B, Hq, D]."""
    return output_error(case.attention, allowed or arithmetic(case.attention.dtype))[:, :, 0]


def causal_output(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    allowed: Arithmetic | None = None,
) -> Tensor:
    """Bound of a prompt's causal attention, [B, Hq, T, D]; arguments as for `oracle.attend`."""
    return output_error(attend(query, key, value, occupied, scale=scale, causal=True),
                        allowed or arithmetic(query.dtype))
