"""Exact arithmetic for claims about softmax attention, and a literal transcription of the published kernel.

A claim about scores s is checked on masses x = exp(s) > 0. Attention weights are x_j / sum(x), so rational masses and
values make everything rational, and both sides of a claim are compared without rounding and without slack. This is no
restriction: every positive rational is exp of a real score, the rationals are dense, and the claims compare continuous
functions with non-strict inequalities. Where a bound contains tanh(w/4), with w a difference of scores, exp(w) is a
ratio of masses, and the comparison is still rational (see `at_most_tanh`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

Vector = tuple[Fraction, ...]


# ---- attention over masses -------------------------------------------------------------------------------------------


def softmax(mass: Sequence[Fraction]) -> list[Fraction]:
    """Weights of scores log(mass)."""
    total = sum(mass)
    return [m / total for m in mass]


def combine(weight: Sequence[Fraction], values: Sequence[Vector]) -> Vector:
    """sum_j weight_j v_j."""
    return tuple(sum(w * v for w, v in zip(weight, column, strict=True)) for column in zip(*values, strict=True))


def attention(mass: Sequence[Fraction], values: Sequence[Vector]) -> Vector:
    return combine(softmax(mass), values)


def without(items: Sequence, index: int) -> list:
    return [*items[:index], *items[index + 1:]]


def effect(mass: Sequence[Fraction], values: Sequence[Vector], index: int) -> Vector:
    """o - o^(\\i) from its definition (LongFlow eq. 4): both attentions computed from scratch."""
    return minus(attention(mass, values), attention(without(mass, index), without(values, index)))


def minus(left: Vector, right: Vector) -> Vector:
    return tuple(a - b for a, b in zip(left, right, strict=True))


def scaled(factor: Fraction, vector: Vector) -> Vector:
    return tuple(factor * x for x in vector)


def dot(left: Vector, right: Vector) -> Fraction:
    return sum((a * b for a, b in zip(left, right, strict=True)), Fraction(0))


def square(vector: Vector) -> Fraction:
    """Squared L2 norm. Bounds on L2 norms are compared squared, both sides being non-negative."""
    return dot(vector, vector)


def norm1(vector: Vector) -> Fraction:
    return sum((abs(x) for x in vector), Fraction(0))


def vector(*components: int | Fraction) -> Vector:
    return tuple(Fraction(x) for x in components)


def lowest(scores: Iterable) -> int:
    """argmin; ties go to the lowest index."""
    scores = list(scores)
    return scores.index(min(scores))


# ---- drift of the scores ---------------------------------------------------------------------------------------------


def growth(before: Sequence[Fraction], after: Sequence[Fraction]) -> Fraction:
    """exp(w) with w = max ds - min ds, the spread of the scores' changes. A constant added to all of them cancels."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return max(ratios) / min(ratios)


def largest_change(before: Sequence[Fraction], after: Sequence[Fraction]) -> Fraction:
    """exp(max |ds|)."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return max(max(ratios), 1 / min(ratios))


def at_most_tanh(x: Fraction, growth: Fraction) -> bool:
    """Whether x <= tanh(w/4), exactly, for growth = exp(w) >= 1.

    tanh(w/4) = (r - 1) / (r + 1) with r = exp(w/2) = sqrt(growth). So for 0 < x < 1 the comparison is
    (1 + x) <= r (1 - x), and its square is rational.
    """
    return x <= 0 or (x < 1 and (1 + x) ** 2 <= growth * (1 - x) ** 2)


# ---- what to draw ----------------------------------------------------------------------------------------------------

# Exact examples are cheap: draw twice as many as the profile says.
many = settings(max_examples=2 * settings().max_examples)

# Scores in +-60 log 2 = +-41.6, including near-ties (a relative step of 2^-20).
masses = st.builds(
    lambda exponent, mantissa: Fraction(2) ** exponent * (1 + Fraction(mantissa, 2**20)),
    st.integers(-60, 60), st.integers(0, 2**20 - 1) | st.integers(0, 2),
)
components = st.builds(
    lambda numerator, scale: Fraction(numerator) * scale,
    st.sampled_from([0, 1, -1]) | st.integers(-1000, 1000),
    st.sampled_from([Fraction(1), Fraction(10**6), Fraction(1, 10**6)]),
)
small_masses = st.integers(1, 3).map(Fraction)
small_components = st.integers(-2, 2).map(Fraction)


@st.composite
def caches(draw: st.DrawFn, min_size: int = 2, max_size: int = 6) -> tuple[list[Fraction], list[Vector]]:
    """Masses and values of a cache of tokens with value vectors of one to three components.

    Wide ranges, or small integers only, which give near-ties and nearly attained bounds.
    """
    size, dim = draw(st.integers(min_size, max_size)), draw(st.integers(1, 3))
    mass, component = (small_masses, small_components) if draw(st.booleans()) else (masses, components)
    values = st.lists(st.tuples(*[component] * dim), min_size=size, max_size=size)
    return draw(st.lists(mass, min_size=size, max_size=size)), draw(values)


# ---- counting operations ---------------------------------------------------------------------------------------------


class Counted:
    """A rational number that counts the operations on it, by name, in a shared Counter."""

    def __init__(self, number: int | Fraction, counts: Counter[str]) -> None:
        self.number, self.counts = Fraction(number), counts

    def _new(self, operation: str, number: Fraction) -> Counted:
        self.counts[operation] += 1
        return Counted(number, self.counts)

    def __add__(self, other: Counted) -> Counted:
        return self._new("add", self.number + other.number)

    def __sub__(self, other: Counted) -> Counted:
        return self._new("add", self.number - other.number)

    def __mul__(self, other: Counted) -> Counted:
        return self._new("multiply", self.number * other.number)

    def __truediv__(self, other: Counted) -> Counted:
        return self._new("divide", self.number / other.number)

    def __abs__(self) -> Counted:
        return self._new("abs", abs(self.number))

    def exp(self) -> Counted:
        """Count an exponential; compute 2 ** x, which is rational."""
        return self._new("exp", Fraction(2) ** int(self.number))


def add_up(terms: Iterable[Counted]) -> Counted:
    """n terms cost n - 1 additions."""
    total, *rest = terms
    for term in rest:
        total = total + term
    return total


# ---- the published kernel --------------------------------------------------------------------------------------------


def algorithm_one(
    score: Tensor, value: Tensor, mask: Tensor | None = None, *, block: int = 4, normalise: bool = True
) -> tuple[Tensor, Tensor, int]:
    """LongFlow's Algorithm 1 from line 17 on, in the arithmetic of `score`'s dtype: output [D], scores [S], victim.

    score [S] are the logits of line 16; value [S, D]; mask [S] bool. There is no running maximum, as in the paper
    (section 3.4). The loop starts at 0 and steps by `block` (LF-16). normalise=False skips line 34.
    """
    slots = score.shape[0]
    mask = torch.ones(slots, dtype=torch.bool) if mask is None else mask
    output, total = value.new_zeros(value.shape[1]), score.new_zeros(())
    loss = score.new_zeros(slots)
    for start in range(0, slots, block):
        chunk = slice(start, start + block)
        weight = score[chunk].masked_fill(~mask[chunk], -math.inf).exp()               # lines 17, 20
        total = total + weight.sum()                                                   # line 21
        contribution = weight[:, None] * value[chunk]                                  # line 24
        output = output + contribution.sum(0)                                          # line 25
        loss[chunk] = contribution.abs().sum(1)                                        # lines 28, 29
    loss = loss / total if normalise else loss                                         # line 34
    return output / total, loss, int(loss.argmin())                                    # lines 33, 35


# ---- inputs for the twins --------------------------------------------------------------------------------------------


def one_head(score: Sequence[float], value: Tensor, device: torch.device) -> dict[str, object]:
    """Arguments of decode_attention for one head whose logits are exactly `score` (float32 numbers, one per slot).

    The query is the first unit vector and the scale is 1, so q . k is one product plus zeros, exact in any order of
    summation. value [S, D] float32. All slots are occupied.
    """
    query = torch.zeros(1, 1, value.shape[1])
    query[..., 0] = 1
    key = torch.zeros(1, 1, *value.shape)
    key[0, 0, :, 0] = torch.tensor(score, dtype=torch.float32)
    return {
        "query": query.to(device), "key": key.to(device), "value": value[None, None].clone().to(device),
        "occupied": torch.ones(1, len(score), dtype=torch.bool, device=device), "scale": 1.0,
    }
