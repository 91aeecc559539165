"""What PM-KVQ chooses before it runs: a budget for each layer, and factors that smooth the keys.

Budgets: each layer gets one of a few widths, so that the sum of their sensitivities is least and the sum of their
memory is within a total (`allocate`). Smoothing: channels of keys that are large for all tokens are divided by a factor
and those of the queries multiplied by it, which does not change a logit. Rotary embeddings turn channels c and c + D/2
together, so that both have one factor, and the factors can be moved into the weights of the layers that make keys and
queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import causal_attention
from ..contract.arguments import check_integer, check_number, check_shape, check_tensor
from .pm_kvq import dequantize, quantize

#: Exponents that are tried: 1, 0.95 and so on to 0.05. Without smoothing, the exponent is 0.
EXPONENTS = tuple(1 - i / 20 for i in range(20))
#: The limits of a factor.
LEAST, MOST = 1e-4, 1e4


def sensitivity(x: Tensor, gradient: Tensor, *, bits: int, group: int = 128) -> float:
    """How much the loss changes if x, the keys or the values [B, H, T, D] of a layer, is quantized to `bits` bits: the
    mean of |(x^ - x) gradient|, with the gradient of the loss by x. That of a layer is the sum for keys and values,
    averaged over samples. Raises TypeError or ValueError for invalid arguments."""
    x = check_tensor("x", x, dims=4, layout="[B, H, T, D]")
    gradient = check_tensor("gradient", gradient, dims=4, layout="[B, H, T, D]")
    check_shape("gradient", gradient, tuple(x.shape), "x's [B, H, T, D]")
    error = dequantize(*quantize(x, bits=bits, group=group), dtype=torch.float64) - x.double()
    return float((error * gradient.double()).abs().mean())


def allocate(
    sensitivities: Sequence[Sequence[float]], memory: Sequence[Sequence[int]] | Sequence[int], total: int
) -> tuple[int, ...]:
    """The choice of each layer, an index, with the least sum of sensitivities whose memory is at most `total`.

    sensitivities: for each layer, a number per choice. memory: for each layer, the memory of each choice, an int; or
    one such list for all layers. Of equal sums, the one with less memory is chosen, then the one whose first layers
    have lower indices. The result is exact: sums of floats are sums of rational numbers.

    Raises TypeError or ValueError for invalid arguments, and ValueError if no choice is within the total.
    """
    costs, sizes = _check_choices(sensitivities, memory)
    check_integer("total", total, minimum=0)
    best: list[tuple[int, Fraction, tuple[int, ...]]] = [(0, Fraction(0), ())]
    for cost, size in zip(costs, sizes, strict=True):
        wider = sorted(
            ((used + size[i], lost + cost[i], (*chosen, i)) for used, lost, chosen in best for i in range(len(cost))),
            key=lambda one: (one[0], one[1], one[2]),
        )
        best = []
        for one in wider:                     # with more memory, only what loses less
            if one[0] <= total and (not best or one[1] < best[-1][1]):
                best.append(one)
        if not best:
            least = sum(min(each) for each in sizes)
            raise ValueError(f"total must be at least {least}, the least memory of all layers, got {total}")
    return min(best, key=lambda one: (one[1], one[0], one[2]))[2]


def _check_choices(
    sensitivities: object, memory: object
) -> tuple[list[list[Fraction]], list[list[int]]]:
    """The sensitivities and the memory of each choice of each layer."""
    if not isinstance(sensitivities, Sequence) or not sensitivities:
        raise ValueError("sensitivities needs a list of numbers per layer, got none")
    costs = []
    for layer, row in enumerate(sensitivities):
        name = f"sensitivities[{layer}]"
        if not isinstance(row, Sequence) or not row:
            raise ValueError(f"{name} needs a number per choice, got {row!r}")
        numbers = [check_number(name, one) for one in row]
        if not all(isfinite(one) and one >= 0 for one in numbers):
            raise ValueError(f"{name} must be finite and at least 0, got {numbers}")
        costs.append([Fraction(one) for one in numbers])
    if not isinstance(memory, Sequence) or not memory:
        raise ValueError("memory needs an int per choice, got none")
    rows = list(memory) if isinstance(memory[0], Sequence) else [memory] * len(costs)
    if [len(row) for row in rows] != [len(row) for row in costs]:
        raise ValueError("memory needs as many layers and choices as sensitivities")
    return costs, [[check_integer("memory", one, minimum=0) for one in row] for row in rows]


class SmoothResult(NamedTuple):
    """The factors of a layer's keys, [Hkv, D] float32, equal in both channels of a rotary pair, and the exponent that
    made them, 0 for factors of 1."""

    factors: Tensor
    exponent: float


def factors(key: Tensor, exponent: float) -> Tensor:
    """Factors [Hkv, D] float32 for keys [B, Hkv, T, D] after the rotary embedding: the largest |key| of any token, in
    either channel of a rotary pair, to the power of `exponent`, from 1e-4 to 1e4."""
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, T, D]")
    if key.shape[-1] % 2:
        raise ValueError(f"key's D must be even, for rotary pairs, got {key.shape[-1]}")
    if not isfinite(check_number("exponent", exponent)):
        raise ValueError(f"exponent must be finite, got {exponent}")
    largest = key.double().abs().amax((0, 2)).unflatten(-1, (2, -1)).amax(1)          # [Hkv, D/2]
    return (largest**exponent).clamp(LEAST, MOST).repeat(1, 2).float()


def smooth(
    query: Tensor, key: Tensor, value: Tensor, *, bits: int = 4, group: int = 128, scale: float | None = None
) -> SmoothResult:
    """The factors of a layer with which its attention loses least if keys and values have `bits` bits.

    query [B, Hq, T, D]; key, value [B, Hkv, T, D], after the rotary embedding, of sequences without padding. Tries the
    exponents 1, 0.95 and so on to 0.05, and 0, and takes the one with the least mean squared error of the causal
    attention's output; of equal ones, the largest. Raises TypeError or ValueError for invalid arguments.
    """
    occupied = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    truth = causal_attention(query, key, value, occupied, scale=scale).double()
    rounded = _rounded(value, bits, group)
    errors = []
    for exponent in (*EXPONENTS, 0.0):
        q, k = smoothed(query, key, factors(key, exponent))
        output = causal_attention(q, _rounded(k, bits, group), rounded, occupied, scale=scale)
        errors.append((float((output.double() - truth).square().mean()), -exponent))
    _, exponent = min(errors)
    return SmoothResult(factors(key, -exponent), -exponent)


def _rounded(x: Tensor, bits: int, group: int) -> Tensor:
    return dequantize(*quantize(x, bits=bits, group=group))


def smoothed(query: Tensor, key: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """The query [B, Hq, T, D] times the factors [Hkv, D] of its KV head, and the key [B, Hkv, T, D] divided by them, in
    their dtypes."""
    check_shape("by", by, (key.shape[1], key.shape[3]), "[Hkv, D]")
    of_query = by.repeat_interleave(query.shape[1] // key.shape[1], 0)[:, None]
    return (query * of_query).to(query.dtype), (key / by[:, None]).to(key.dtype)


def smoothed_weights(query: Tensor, key: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the projections, [Hq * D, hidden] and [Hkv * D, hidden], with the factors [Hkv, D] in their rows,
    so that the rotary embedding of their outputs gives `smoothed` queries and keys."""
    by = check_tensor("by", by, dims=2, layout="[Hkv, D]")
    rows, heads = by.numel(), query.shape[0] // by.shape[1]
    check_shape("key", key, (rows, key.shape[1]), "[Hkv * D, hidden]")
    if query.shape[0] % rows:
        raise ValueError(f"query needs a multiple of {rows} rows, got {query.shape[0]}")
    of_query = by.repeat_interleave(heads // by.shape[0], 0).flatten()
    return (query * of_query[:, None]).to(query.dtype), (key / by.flatten()[:, None]).to(key.dtype)
