"""A priori error bounds of correct arithmetic against the truth. Every term is derived; there are no tolerances.

The model. Inputs are float32, float16 or bfloat16 and are exact. Intermediate results are float32: every operation
rounds, fl(a op b) = (a op b)(1 + e) with |e| <= u = 2^-24, in any order of summation, fused or not, and may flush
operands and results below 2^-126 to zero. In addition, hardware may

- truncate in tensor cores, so that a dot product of 16-bit inputs loses 2u per addition (c = 2, else c = 1);
- approximate exp2 to 2^-22 relative (PTX ex2.approx), log2 to 2^-22 absolute for results within [-1, 1], else
  relative (lg2.approx), and division to 2 ulp (div.full): EXP, LOG, DIVISION below;
- compute tanh y as a function of e^(-2 |y|), or by a quotient of polynomials near 0, with the relative error TANH. For
  (1 - e) / (1 + e) from |y| = 1/2 on: e has the errors of its argument, 4 |y| u, and EXP. They move the result by up
  to 2 e / (1 - e^2) as much, 0.85 (2 + 4) u at 1/2 and less beyond. Two sums add 2 u, the quotient DIVISION: 11.1 u.
  Below 1/2, the roundings of the square and of two polynomials, fused or not, a product and DIVISION: 9.4 u;
- cast the weights P to the value's 16-bit type before P @ V (u_P); it always rounds the output to that type (u_out).

A softmax may be blocked: it keeps a running maximum and multiplies by exp(m_old - m_new) wherever the maximum rises. A
rise costs one exponential and one multiplication. Blocks have at least `block` = 16 slots, the smallest tile of a
tensor core. gamma(n) = n u / (1 - n u) bounds n successive roundings: |prod (1 + e_i) - 1| <= gamma(n).

FP8 numbers are exact in float32, float16 and bfloat16. Their products with float32 scales are not: each scale is one
more rounding, of every key or value, or of the logit, the output or the norm, since all slots of a head have the same
scale. (A scale may also be multiplied with other constants first.) To round scaled keys or values to 16 bits is not
allowed. Where a scale comes after other operations, it also multiplies what they lose by underflow. Scaled numbers are
zero or normal float32 numbers, as are products of scales.

The bounds are exact in the large terms (differences of exponentials, not their linearisation), so they hold for logits
of 1e4, where a weight may be off by percents. Intermediate overflow of float32 is not covered, and no case is drawn
with it. The oracle's own float64 error is below 2^-25 of each bound; SLACK covers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference import attention as eager
from ...reference.attention import per_query_head
from ..cases.oracle import Attention, attend

UNIT = 2.0**-24
FLUSH = 2.0**-126
EXP = 2.0**-22
LOG = 2.0**-22
DIVISION = 4 * UNIT
TANH = 12 * UNIT
SLACK = 1 + 2.0**-20

#: For each output type: unit roundoff, and the absolute error of rounding to subnormal numbers.
UNITS = {torch.float32: UNIT, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float32: FLUSH, torch.float16: 2.0**-25, torch.bfloat16: FLUSH}


class Interval(NamedTuple):
    """The interval of a computed score: low <= score <= high, tensors of the scores' shape; -inf is a valid score."""

    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic allowed for inputs of `dtype`. `weight_dtype`: the type that P is cast to."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    block: int = 16

    @property
    def dot(self) -> int:
        """c: the number of unit roundoffs per addition of a dot product."""
        return 1 if self.dtype == torch.float32 else 2

    def rises(self, attention: Attention) -> Tensor:
        """R: how often a running maximum can rise after a slot was added, [B, Hq, Q, 1]: once per later block,
        once more where splits are combined, and at most as often as there are slots and sinks."""
        blocks = math.ceil(attention.logit.shape[-1] / self.block) + 1
        return (attention.count + attention.sinks).clamp_max(blocks)


def arithmetic(dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None, block: int = 16) -> Arithmetic:
    """The allowed arithmetic for inputs of `dtype`. P may be cast to `weight_dtype`, which defaults to `dtype`."""
    return Arithmetic(dtype, weight_dtype or dtype, block)


def gamma(count: Tensor | float) -> Any:
    """n u / (1 - n u): the relative error of n successive roundings; infinite from n u = 1 on."""
    lost = count * UNIT
    if isinstance(lost, Tensor):
        return torch.where(lost < 1, lost / (1 - lost), torch.inf)
    return lost / (1 - lost) if lost < 1 else math.inf


def logit_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """delta_j [B, Hq, Q, S]: the error of s_j as the argument of the exponential, |computed s_j - s_j|.

    s_j = scale * q . k_j. In the dot product, a term passes through at most D operations, its product included, with c
    roundings each. Two more follow for the scale (itself rounded; in base 2 it contains log2(e)) and the product with
    it: gamma(c (D + 2)) * |scale| sum_d |q_d k_jd|. Subtracting the maximum, or the log-sum-exp in one or two parts,
    and converting between bases: at most four roundings of numbers no larger than |s_j| + |m|: 4 u (|s_j| + |m|).
    (Rescalings telescope: m - m_1 + m_1 - m_2 + ... adds at most u (m - s_j) in all.) Products that underflow: FLUSH
    each. Rounded queries and keys add `attention.rotation`. The scale of FP8 keys adds one operation to each term.
    A softcap changes what precedes the maximum: see `capped_error`.
    """
    logit = attention.logit.masked_fill(~attention.seen, 0)
    key_scale, _ = attention.scales or (1.0, 1.0)
    terms = allowed.dot * (attention.head_dim + 2) + (attention.scales is not None)
    error = gamma(terms) * attention.dot
    if attention.rotation is not None:
        error = error + attention.rotation
    error = error + terms * FLUSH * (abs(attention.scale) * max(1.0, key_scale) + 1)
    if attention.softcap is not None:
        error = capped_error(attention, error)
    error = error + 4 * UNIT * (logit.abs() + attention.row_max.abs())
    return error.masked_fill(~attention.seen, 0)


def capped_error(attention: Attention, error: Tensor) -> Tensor:
    """|computed - true| of s_j = c tanh(x_j / c), for logits x_j that are computed with this error, [B, Hq, Q, S].

    s increases with x, with slopes up to 1: the error moves s_j by at most s(x_j + e_j) - s(x_j) or s(x_j) - s(x_j -
    e_j), which is less than e_j, and nearly 0 far beyond the cap. The rest is relative. Above 0, tanh is concave and 0
    at 0, so |tanh((1 + r) y)| is at most (1 + r) |tanh y|, and at least (1 - r) |tanh y| with 1 - r: a rounding of the
    argument costs no more than one of the result. These are: c and x / c (rounded c, and a product with the rounded
    scale / c, or DIVISION), TANH, c again (in base 2, it contains log2(e)) and the product. What flushes to zero before
    that product, the argument or tanh, costs up to c FLUSH each.
    """
    assert attention.softcap is not None and attention.uncapped is not None
    cap, raw = attention.softcap, attention.uncapped.masked_fill(~attention.seen, 0)
    here = eager.softcapped(raw, cap)
    moved = torch.maximum(eager.softcapped(raw + error, cap) - here, here - eager.softcapped(raw - error, cap))
    relative = gamma(3 + (DIVISION + TANH) / UNIT)
    return moved + (here.abs() + moved) * relative * SLACK + 3 * FLUSH * cap


class WeightError(NamedTuple):
    """Errors of softmax weights, [B, Hq, Q, S] (denominators [B, Hq, Q, 1]).

    tau, denominator_below, denominator_above: errors of logarithms. absolute: |computed a_j - a_j| for weights divided
    by their own sum, without underflow (which is FLUSH).
    """

    tau: Tensor
    absolute: Tensor
    denominator_below: Tensor
    denominator_above: Tensor


def weight_error(attention: Attention, allowed: Arithmetic) -> WeightError:
    """rho_j a_j, the error of a_j = softmax(s)_j: from delta_j, the exponentials, the sum and the division.

    The computed exponential is exp(s_j - m) exp(t_j), |t_j| <= tau_j = delta_j + (1 + R) (EXP + u): one exponential
    and up to R rescalings, each an exponential and a product. The maximum m cancels. So the computed weight is
    a_j exp(t_j) / sum_i a_i exp(t_i), up to gamma(n + 1) of the sum over the n attended slots and DIVISION. It
    increases with t_j and decreases with every other t_i, so the extremes are at t_j = +-tau_j, t_i = -+tau_i:

        up_j   =  tau_j - log(a_j e^tau_j  + sum_{i != j} a_i e^-tau_i) + g
        down_j = -tau_j - log(a_j e^-tau_j + sum_{i != j} a_i e^tau_i)  - g,   g = gamma(n + 1) + DIVISION

    as errors of log a_j. This covers both the largest and the average delta: a single dominant token has the error g
    only. An attention sink is one more term of the sums, of which the logit is exact. No weight exceeds e^g.
    """
    weight, seen = attention.weight, attention.seen
    tau = logit_error(attention, allowed) + (1 + allowed.rises(attention)) * (EXP + UNIT) * SLACK
    # A bound beyond e^300 is meaningless (no weight exceeds e^g), and larger ones could give inf - inf.
    tau = tau.masked_fill(~seen, 0).clamp_max(300)
    grown, shrunk = weight * tau.exp(), weight * (-tau).exp()
    least, most = shrunk.sum(-1, keepdim=True), grown.sum(-1, keepdim=True)
    if attention.sink_logits is not None:
        sink = eager.with_sinks(attention.logit, attention.sink_logits)[..., -1:]
        off = 4 * UNIT * (sink.abs() + attention.row_max.abs())
        off = (off + (1 + allowed.rises(attention)) * (EXP + UNIT) * SLACK).clamp_max(300)
        share = (sink - attention.lse).exp()
        least, most = least + share * (-off).exp(), most + share * off.exp()
    # An empty row gets 1.
    least, most = (total.masked_fill(total == 0, 1) for total in (least, most))
    last = (gamma(attention.count + 1 + attention.sinks) + DIVISION) * SLACK
    up = tau - (least - shrunk + grown).log() + last
    down = -tau - (most - grown + shrunk).log() - last
    high = torch.minimum(weight * up.exp(), last.exp())
    absolute = torch.maximum(high - weight, weight * -torch.expm1(down)).clamp_min(0)
    return WeightError(tau, absolute.masked_fill(~seen, 0), least.log() - last, most.log() + last)


def output_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """Attention output [B, Hq, Q, D]: sum_j a_j |v_jd| (rho_j + u_P + gamma(c n)) + u_out |o_d|, and underflow.

    Each term of sum_j a_j v_jd has its weight's error, the cast of P (u_P; to float16 also 2^-25 absolute, half its
    smallest number, since P <= 1), and at most n roundings in the product and the sum over the n attended slots, c
    each. Absolute: exponentials, rescaled sums and casts below FLUSH flush to zero (four FLUSH of each |v_jd|), as do
    products and sums below it (four FLUSH per slot). The scale of FP8 values is one more rounding. The last rounding,
    to the output's type, applies to the computed number.
    """
    error = weight_error(attention, allowed).absolute
    unit, tiny = 0.0, 4 * FLUSH
    if allowed.weight_dtype != torch.float32:
        unit = UNITS[allowed.weight_dtype]
    if allowed.weight_dtype == torch.float16:
        tiny += TINY[torch.float16]
    _, value_scale = attention.scales or (1.0, 1.0)
    sums = gamma(allowed.dot * attention.count + (attention.scales is not None))
    per_weight = error + (unit + sums * (1 + unit)) * (attention.weight + error)
    values = per_query_head(attention.value.abs(), attention.query_heads)                 # [B, Hq, S, D]
    flushed = 4 * FLUSH * attention.count * max(1.0, value_scale) + FLUSH * (attention.scales is not None)
    total = (per_weight + tiny * attention.seen) @ values + flushed
    total = (total + UNITS[allowed.dtype] * (attention.output.abs() + total) + TINY[allowed.dtype]) * SLACK
    # A query that attends to nothing has an output of exact zeros.
    return total.masked_fill(~attention.seen.any(-1, keepdim=True), 0)


def log_weight_error(attention: Attention, allowed: Arithmetic) -> Interval:
    """Errors of log a_hj = s_j - lse, as (below <= 0, above >= 0), [B, Hq, Q, S]; also relative errors of
    a_hj = exp(s_j - lse).

    The errors of numerator and normaliser are independent here, since logits may be stored, or computed twice: tau_j
    from the numerator, and the weighted average of e^+-tau_i from the normaliser. To these add the logarithm of the sum
    l, LOG max(1, log2(l)), and the roundings of lse = m + log l and of the difference beyond those in delta_j: with
    log l = lse - m, together 6 u (lse - m) + LOG.
    """
    errors = weight_error(attention, allowed)
    spread = attention.lse - attention.row_max
    extra = errors.tau + (LOG * (1 + spread) + 6 * UNIT * spread) * SLACK
    return Interval(-(extra + errors.denominator_above), extra - errors.denominator_below)


def decode_output(case: Any, allowed: Arithmetic | None = None) -> Tensor:
    """Bound of `decode_attention(...).output`, [B, Hq, D]."""
    return output_error(case.attention, allowed or arithmetic(case.attention.dtype))[:, :, 0]


def causal_output(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    allowed: Arithmetic | None = None, **changes: Any,
) -> Tensor:
    """Bound of a prompt's causal attention, [B, Hq, T, D]; arguments as for `oracle.attend`."""
    return output_error(attend(query, key, value, occupied, scale=scale, causal=True, **changes),
                        allowed or arithmetic(query.dtype))
