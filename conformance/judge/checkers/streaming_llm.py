"""Checker of StreamingLLM: positions alone decide, so only the attention output has an error bound.

With `inv_freq`, it includes the errors of the rotation by places in the cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.attention import per_query_head
from ... import stats
from ...cases.block_cases import LAYOUTS, ORDERS, PositionsCase, positions_cases
from ...cases.contents import OCCUPANCIES
from ...cases.oracle import Attention, attend
from .. import block_model, lockstep, recorded
from ..bounds import FLUSH, SLACK, TINY, UNIT, UNITS, gamma
from ..compare import assert_dtype, assert_same
from ..fields import field
from ..subjects import Subject, properties
from ..variants import BLOCKS, ONE, variant
from . import blocks
from .blocks import Chunk

SMALL = {**blocks.SMALL, "sinks": 1}
#: Its authors' four sinks.
DEFAULTS = {"sinks": 4, "inv_freq": None, "block_size": 128, "softcap": None, "scale": None}
SAME = ("sinks",)
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "rotated": {"budget": 5, "block_size": 4, "sinks": 2, "rerotate_keys": True},
    "a sink": {"budget": 6, "block_size": 4, "sinks": 1},
    "sinks": {"budget": 5, "block_size": 3, "sinks": 4},
    "no sinks": {"budget": 4, "block_size": 7, "sinks": 0},
}
#: Frequencies for any head_dim. The last angles are small.
FREQUENCIES = (1.0, 0.3, 0.07, 0.004)
VARIANTS = (
    *BLOCKS, variant("budget-of-1", {"sinks": 0}, budget=1, steps=4),
    variant("rotated-keys", {"inv_freq": FREQUENCIES, "sinks": 2}, turns=((3, 2),)),
    variant("rotated-keys-without-sinks", {"inv_freq": FREQUENCIES, "sinks": 0}, padding="random", steps=11),
    variant("rotated-keys-in-blocks-of-35", {"inv_freq": FREQUENCIES, "sinks": 2, "block_size": 35}, **ONE, budget=50,
            prompt=70, steps=3),
)
GROUPINGS = ({"inv_freq": FREQUENCIES},)
COMPILED = ({"softcap": 2.0},)
PLAIN: dict[str, Any] = {"inv_freq": None}
AUTHORS = {"rerotate_keys": True}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "sinks": 4}, ValueError, "sinks must be less than budget = 4"),
    ({"budget": 4, "sinks": 1, "inv_freq": (1.0,)}, TypeError, "inv_freq is not an option"),
    ({"budget": 4, "sinks": 1, "rerotate_keys": 1}, TypeError, "rerotate_keys must be a bool"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("sinks", blocks.NOT_INTEGERS, TypeError, "sinks must be an int"),
    ("sinks", (-1,), ValueError, "sinks must be at least 0"),
    ("sinks", (4, 5), ValueError, "sinks must be less than budget = 4, got"),
    ("inv_freq", (0.5, [1.0], torch.ones(2)), TypeError, "inv_freq must be a tuple of floats"),
    ("inv_freq", ((1.0, "a"), (1.0, None)), TypeError, r"inv_freq\[1\] must be a float"),
    ("inv_freq", ((),), ValueError, "inv_freq must have at least one frequency"),
    ("inv_freq", ((1.0, 0.0), (1.0, 1.5), (1.0, -0.5)), ValueError, r"inv_freq\[1\] must be above 0 and at most 1"),
]


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    config = draw(blocks.block_configs(most))
    pairs = draw(st.sampled_from((None, 1, 3, 8)))
    inv_freq = None if pairs is None else tuple(2.0 ** -(7 * pair / pairs) for pair in range(pairs))
    return {**config, "sinks": draw(st.integers(0, min(4, config["budget"] - 1))), "inv_freq": inv_freq}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    # A budget that the default sinks allow.
    positions = torch.tensor([[0, 5, 2, 6, 1, 3], [7, 2, -1, -1, 9, 4]], device=device)
    return {"positions": positions, "budget": 5, "sinks": 1}


def assert_keep_right(actual: Tensor, case: PositionsCase) -> None:
    """actual: `keep(**case.inputs)`. Every token is a decision: the positions settle it."""
    with field("kept"):
        assert_dtype(actual, torch.bool, what="kept")
        expected = [[_stays(row, case.budget, case.sinks) for row in rows] for rows in case.positions.tolist()]
        assert_same(actual, torch.tensor(expected, device=actual.device), what="kept")
        tokens = int((case.positions >= 0).sum())
        stats.decisions(tokens, tokens)


def _stays(row: list[int], budget: int, sinks: int) -> list[bool]:
    """Whether each slot's token is among the first `sinks` or the newest budget - sinks."""
    ordered = sorted(position for position in row if position >= 0)
    kept = {*ordered[:sinks], *ordered[max(sinks, len(ordered) - (budget - sinks)):]}
    return [position in kept for position in row]


SUBJECTS = (
    Subject(
        "keep", positions_cases, assert_keep_right, choices=("kept",),
        properties=properties(ordinary=ORDERS, masked=OCCUPANCIES[1:], layout=LAYOUTS), recorded=recorded.positions,
    ),
)


class Model(block_model.Head):
    """The oldest token that is no sink is evicted."""

    def rank(self, token: block_model.Token) -> float:
        return token.position

    def protected(self, positions: list[int]) -> set[int]:
        return set(sorted(positions)[:self.config.sinks])


class Rotated(NamedTuple):
    """Vectors [B, H, N, D] after their rotation, in float64, and the largest error of the computed ones."""

    exact: Tensor
    error: Tensor


def rotated(vector: Tensor, place: Tensor, inv_freq: tuple[float, ...], dtype: torch.dtype) -> Rotated:
    """The rotation of vector [B, H, N, D] float64 by place [B, H, N], and the error of its computation.

    y_d = x_d cos a - x_e sin a and y_e = x_e cos a + x_d sin a with a = place * f. The frequency and the product are
    rounded to float32 (a place is exact): |a' - a| <= gamma(2) a. The computed cosine and sine are within 2 ulp of
    those of a', and an ulp of a number up to 1 is at most 2 u: with slopes up to 1, both have the error
    e = gamma(2) a + 4 u. Each product passes through at most two roundings, its own and that of the sum:

        |y' - y| <= (|x_d| + |x_e|) e + gamma(2) (|x_d| (|cos a| + e) + |x_e| (|sin a| + e)),

    and the other one alike. Numbers below FLUSH flush to zero, inputs, products, and results. The result may be rounded
    to `dtype`. Channels that do not rotate are exact.
    """
    pairs = len(inv_freq)
    angle = place[..., None] * torch.tensor(inv_freq, dtype=torch.float64, device=vector.device)
    cos, sin = angle.cos(), angle.sin()
    one, other, rest = vector[..., :pairs], vector[..., pairs:2 * pairs], vector[..., 2 * pairs:]
    off = gamma(2) * angle + 4 * UNIT
    exact, error = [], []
    for own, partner, sign in ((one, other, -1), (other, one, 1)):
        exact.append(own * cos + sign * partner * sin)
        sizes = own.abs() * (cos.abs() + off) + partner.abs() * (sin.abs() + off)
        computed = (own.abs() + partner.abs()) * off + gamma(2) * sizes + 4 * FLUSH
        error.append(computed + UNITS[dtype] * (exact[-1].abs() + computed) + TINY[dtype])
    return Rotated(torch.cat([*exact, rest], -1), torch.cat([*error, torch.zeros_like(rest)], -1) * SLACK)


class Adapter(blocks.Adapter):
    """Ranks are positions; scores are 0."""

    def attention(self, chunk: Chunk) -> Attention:
        """With `inv_freq`: of rotated queries and keys, whose errors q' and k' change a logit by at most
        |scale| sum_d (|q_d| k'_d + q'_d |k_d| + q'_d k'_d)."""
        inv_freq = chunk.reference.config.inv_freq
        if inv_freq is None:
            return chunk.attention
        before, count = chunk.before, chunk.before["query"].shape[2]
        end = chunk.reference.config.capacity + count
        positions, occupied = before["positions"][..., :end], before["occupied"][..., :end]
        older = (positions[..., None, :] < positions[..., :, None]) & occupied[..., None, :]      # [B, Hkv, end, end]
        place = older.sum(-1).masked_fill(~occupied, 0)
        own = per_query_head(place[..., end - count:], before["query"].shape[1])
        query = before["query"].masked_fill(~before["valid"][:, None, :, None], 0)
        key = before["key"][:, :, :end].masked_fill(~occupied[..., None], 0)
        q, k = rotated(query, own, inv_freq, chunk.dtype), rotated(key, place, inv_freq, chunk.dtype)
        scale, changes = lockstep.scale_of(chunk.reference), lockstep.changes_of(chunk.reference)
        exact = attend(
            q.exact, k.exact, before["value"][:, :, :end], occupied, scale=scale, causal=True, **changes
        )
        most = attend(
            q.exact.abs() + q.error, k.exact.abs() + k.error, before["value"][:, :, :end], occupied, scale=scale,
            causal=True,
        )
        sizes = attend(q.exact.abs(), k.exact.abs(), before["value"][:, :, :end], occupied, scale=scale, causal=True)
        return replace(exact, dot=most.dot, dtype=chunk.dtype, rotation=(most.dot - sizes.dot).clamp_min(0) * SLACK)
