"""Checker of KeyDiff: bounds of its scores, its ranks and the running sum of a state; its choices; configs to draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference import keydiff
from ....reference._validate_scales import FP8
from ....reference.contract import Pages
from ...cases import draws
from ...cases.case import Case
from ...cases.contents import OCCUPANCIES
from ...cases.in_pages import PAGED, PagedKeyCase, paged_fp8_key_cases, paged_key_cases, with_pages
from ...cases.key_cases import ANCHORS, PROTECTIONS, SIMILARITIES, KeyCase, fp8_key_cases, key_cases
from .. import compare, recorded
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, Interval, gamma
from ..compare import Verdict, assert_dtype, assert_same, assert_within, gathered, undecided
from ..fields import field
from ..oracle import oracle, upcast, upcast_all
from ..subjects import Fp8Subject, Subject, aspects
from ..ties import tie_classes
from . import blocks
from .blocks import Chunk

CASES = (KeyCase, PagedKeyCase)
#: Eq. 8. The window is an ablation (table 11).
DEFAULTS = {
    "recent": 0, "anchor": "mean_normalized", "similarity": "cosine", "block_size": 128, "refresh": 64, "scale": None,
}
SAME = ("recent", "anchor", "similarity")
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4},
    "recent": {"budget": 5, "block_size": 3, "recent": 2},
    "ablation": {"budget": 6, "block_size": 4, "anchor": "median", "similarity": "euclidean"},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "recent": 5}, ValueError, "recent must be"),
    ({"budget": 4, "anchor": "mode"}, ValueError, "anchor must be"),
    ({"budget": 4, "similarity": "angle"}, ValueError, "similarity must be"),
]
#: Options that allow small budgets, for the laws: see the package. Their prompts are one or two blocks long.
SMALL = {"block_size": 6}

#: An approximate square root, or its inverse (PTX sqrt.approx, rsqrt.approx: 2^-22.9 at the worst).
ROOT = 2.0**-22
#: The part of a product with a normalised key that may flush to zero: keys longer than 2^-40 need not be scaled up.
LOST = FLUSH * 2.0**40


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    return {"recent": 1}


def variants(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """See the package: FP8 keys, and values with them."""
    found = []
    for dtype in FP8:
        made = {part: given[part].to(dtype) for part in given if part in ("key", "value")}
        if "pages" in given:
            key, value, table = given["pages"]
            made["pages"] = Pages(key.to(dtype), value.to(dtype), table)
        if "similarity" in given:
            made["similarity"] = "cosine"
        found.append({**given, **made})
    return found


# Bounds --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """Exact directions of low-precision keys, in float64, and their error bounds.

    key [B, Hkv, S, D], zeros where unoccupied; occupied [B, Hkv, S]; anchor as in `score`. carried [B, Hkv, 1, D]: the
    error of the sum of normalised keys, if it may be carried from step to step instead of recomputed (see `Drift`).

    A computed k^_id = k_id / ||k_i|| is k^_id (1 + common)(1 + own) + vanished:
    - own, independent for each channel: the scaling by the largest magnitude and the division (or the product with an
      inverse), 2 DIVISION.
    - common to all channels of a key: the error of the length, which is gamma(D) / 2 for the sum of squares of scaled
      numbers (DIVISION) and a ROOT; and one DIVISION for a factor that all ranks share, as in implementations that rank
      by the cosine. Together 2 DIVISION + ROOT + gamma(D + 2) / 2.
    - vanished: channels below 2^-126 may flush to zero, by the triangle inequality 2 sqrt(D) FLUSH / ||k_i|| of a unit
      vector; at most 1, since no sign changes.
    """

    key: Tensor
    occupied: Tensor
    anchor: str = "mean_normalized"
    carried: Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.key.shape[-1]

    @property
    def own(self) -> float:
        return 2 * DIVISION

    @property
    def common(self) -> float:
        common: float = ROOT + 2 * DIVISION + gamma(self.head_dim + 2) / 2
        return common

    @cached_property
    def unit(self) -> Tensor:
        """k^_i, [B, Hkv, S, D]."""
        return keydiff.normalized(self.key)

    @cached_property
    def vanished(self) -> Tensor:
        """[B, Hkv, S, 1]; 0 for zero keys."""
        size = self.key.norm(dim=-1, keepdim=True)
        lost = (2 * self.head_dim**0.5 * FLUSH / size.clamp_min(1e-300)).clamp_max(1)
        return lost.masked_fill(size == 0, 0)

    @cached_property
    def count(self) -> Tensor:
        """The number of keys, [B, Hkv, 1, 1] float64, at least 1."""
        return self.occupied.sum(-1).clamp_min(1)[..., None, None].double()

    @cached_property
    def unit_sum_error(self) -> Tensor:
        """|computed - true| of sum_j k^_j in each channel, [B, Hkv, 1, D], when summed over all keys.

        Each term has its own error and passes through at most n roundings in any order of summation.
        """
        size = self.unit.abs()
        term = ((1 + self.own) * (1 + self.common) - 1) * size + self.vanished
        error = (term + gamma(self.count) * (size + term)).sum(2, keepdim=True) + LOST
        return error * SLACK

    @cached_property
    def direction(self) -> Tensor:
        """The vector that ranks use instead of the anchor, [B, Hkv, 1, D]: see the reference's `direction`."""
        return keydiff.direction(self.key, self.occupied, self.anchor)

    @cached_property
    def direction_error(self) -> Tensor:
        """|computed - true| of `direction` in each channel, up to a common factor.

        For a mean, each key is scaled (DIVISION) and passes through n roundings and one division; keys far below the
        largest may flush to zero. A median is one of the numbers in each channel, scaled (DIVISION) by the largest of
        the medians; numbers below 2^-126 may flush to zero.
        """
        if self.anchor == "mean_normalized":
            return self.unit_sum_error if self.carried is None else self.carried
        if self.anchor == "median":
            largest = keydiff.center(self.key, self.occupied, self.anchor).abs().amax(-1, keepdim=True)
            lost = (FLUSH / largest.clamp_min(1e-300)).clamp_max(1).masked_fill(largest == 0, 0)
            return DIVISION * self.direction.abs() * SLACK + lost + FLUSH
        size = keydiff.scaled_down(self.key.flatten(2))[0].view(self.key.shape).abs().sum(2, keepdim=True) / self.count
        return (gamma(self.count) + 2 * DIVISION) * size * SLACK + LOST

    def product_error(self, extra: float = 0, *, order_only: bool = False) -> Tensor:
        """|computed - true| of k^_i . direction, [B, Hkv, S]; 0 for a zero key.

        Per channel: the error of each factor, gamma(D) for the products and their sum, and `extra` for further errors
        of the direction's channels. Per key: the common error of the length. Products may flush to zero.

        order_only: the bound up to a number that all keys of a head share. An error e of the direction changes
        k^_i . direction by k^_i . e = c . e + (k^_i - c) . e for any c. The first part is the same for all keys and
        changes no order. With c the mean of the k^_i, the second part is small where keys nearly agree, so that such
        keys remain distinguishable although their n terms are summed in any order, gamma(n). (A zero key ranks exactly
        0 among keys whose ranks have moved, so its bound includes all of c . e.)
        """
        size, direction = self.unit.abs(), self.direction.abs()
        off = self.direction_error + extra * (direction + self.direction_error)
        each = self.own * size + self.vanished
        center = self.unit.sum(2, keepdim=True) / self.count if order_only else torch.zeros_like(direction)
        channels = each * (direction + off) + (self.unit - center).abs() * off
        channels = channels + gamma(self.head_dim) * (size + each) * (direction + off)
        error = channels.sum(-1)
        true = (self.unit * self.direction).sum(-1).abs()
        error = (error + self.common * (true + error + (size * off).sum(-1)) + self.head_dim * LOST) * SLACK
        return self._of_occupied(error) if order_only else self._of_keys(error)

    def cosine_error(self) -> Tensor:
        """|computed - true| of cos(anchor, k_i), [B, Hkv, S]; 0 for a zero key.

        The product above divided by the anchor's length L. The anchor may be divided by n and by L in each channel (2
        DIVISION); L has the anchor's error, the error of the sum of squares and a ROOT; then one last division.
        Everything is divided by L: where the anchor vanishes, the cosine is noise, but is still at most 1 up to
        rounding.
        """
        length = self.direction.norm(dim=-1)                                            # [B, Hkv, 1]
        off = self.direction_error.norm(dim=-1) + (2 * DIVISION + ROOT + gamma(self.head_dim + 2)) * length
        off = off + LOST
        true = (self.unit * self.direction).sum(-1).abs()
        product = self.product_error(2 * DIVISION)
        least = length - off
        ratio = true / length.clamp_min(1e-300)
        error = (product + ratio * off) / least.clamp_min(1e-300) * (1 + DIVISION) + DIVISION * ratio
        most = 1 + ratio + 4 * (self.own + self.common + ROOT + gamma(2 * self.head_dim + 2))
        error = torch.where(least > 0, torch.minimum(error, most), most)
        return self._of_keys(error * SLACK)

    def mean_error(self) -> tuple[Tensor, Tensor]:
        """The anchor mu itself, and |computed - true| of it, [B, Hkv, 1, D]."""
        mu = keydiff.center(self.key, self.occupied, self.anchor)
        if self.anchor == "median":
            return mu, torch.full_like(mu, FLUSH)
        if self.anchor == "mean_normalized":
            error = self.direction_error / self.count
        else:
            error = gamma(self.count) * self.key.abs().sum(2, keepdim=True) / self.count + 2 * FLUSH
        return mu, (error + DIVISION * (mu.abs() + error)) * SLACK + FLUSH

    def dot_error(self, *, order_only: bool = False) -> Tensor:
        """|computed - true| of mu . k_i: the anchor's error, and gamma(D). order_only: see `product_error`."""
        mu, off = self.mean_error()
        size = self.key.abs()
        apart = (self.key - self.key.sum(2, keepdim=True) / self.count).abs() if order_only else size
        error = apart * off + size * gamma(self.head_dim) * (mu.abs() + off) + FLUSH * (2 + size + mu.abs())
        return self._of_occupied(error.sum(-1) * SLACK)

    def distance_error(self) -> Tensor:
        """|computed - true| of ||k_i - mu||: by the triangle inequality, the length of the difference's errors, plus
        the error of computing a length, in which squares below FLUSH may flush to zero."""
        mu, off = self.mean_error()
        difference = (self.key - mu).abs()
        error = (off + UNIT * (difference + off) + FLUSH).norm(dim=-1)
        of_length = gamma(self.head_dim + 2) / 2 + ROOT + 3 * DIVISION
        error = error + of_length * (difference.norm(dim=-1) + error) + (self.head_dim * FLUSH) ** 0.5
        return self._of_occupied(error * SLACK)

    def pairwise_error(self) -> Tensor:
        """|computed - true| of sum_j k^_i . k^_j, [B, Hkv, S], summed over channels and keys in any order.

        Each of the n D products has the errors of both keys and passes through at most n + D roundings.
        """
        size = self.unit.abs()
        relative = ((1 + self.own) * (1 + self.common)) ** 2 * (1 + gamma(self.count + self.head_dim)) - 1
        total = (size + self.vanished).sum(2, keepdim=True)
        error = relative * (size + self.vanished) * total
        error = error + self.vanished * total + size * self.vanished.sum(2, keepdim=True)
        error = error.sum(-1) + self.count[..., 0] * self.head_dim * LOST
        return self._of_keys(error * SLACK)

    def _of_keys(self, error: Tensor) -> Tensor:
        """The error, with 0 for zero keys and unoccupied slots, whose results are exact."""
        return error.masked_fill(~self.occupied | (self.key == 0).all(-1), 0)

    def _of_occupied(self, error: Tensor) -> Tensor:
        return error.masked_fill(~self.occupied, 0)


def score_error(keys: Keys, similarity: str) -> Tensor:
    """Bound of `score`, [B, Hkv, S]; 0 where unoccupied, and for a cosine with a zero key."""
    return {"cosine": keys.cosine_error, "dot": keys.dot_error, "euclidean": keys.distance_error}[similarity]()


def rank_error(keys: Keys, similarity: str) -> Tensor:
    """Bound of the reference's `rank`, which orders evictions (cosines without their divisions), up to a number that
    all keys of a head may share."""
    if similarity == "euclidean":
        return keys.distance_error()
    return (keys.product_error if similarity == "cosine" else keys.dot_error)(order_only=True)


def keys_of(case: KeyCase) -> Keys:
    occupied = case.mask
    return Keys(keydiff.occupied_keys(upcast(case.key), occupied), occupied, case.anchor)


def rank_interval(case: KeyCase) -> Interval:
    """Interval of the computed rank of each key, [B, Hkv, S]."""
    keys = keys_of(case)
    rank = keydiff.rank(upcast(case.key), keys.occupied, case.anchor, case.similarity)
    error = rank_error(keys, case.similarity)
    return Interval(rank - error, rank + error)


def equal_keys(key: Tensor, occupied: Tensor) -> Tensor:
    """Classes of keys that rank the same, [B, Hkv, S]: bitwise equal keys, and all zero keys."""
    return tie_classes(key, key, occupied, per_head=True)


# Verdicts ------------------------------------------------------------------------------------------------------------


def assert_score_right(actual: Tensor, case: KeyCase) -> float:
    """actual: `score(**case.score_inputs)` of the implementation under test. Returns the utilisation."""
    assert_dtype(actual, torch.float32, what="score")
    truth = keydiff.score(**upcast_all(case.score_inputs))
    return assert_within(actual, truth, score_error(keys_of(case), case.similarity), what="score")


def assert_pairwise_right(actual: Tensor, case: KeyCase) -> float:
    """actual: `pairwise_score(**case.pairwise_inputs)`."""
    assert_dtype(actual, torch.float32, what="pairwise score")
    keys = keys_of(case)
    # Sum over j first (eq. 10): the same number in O(S) memory.
    truth = -(keydiff.direction(keys.key, keys.occupied, "mean_normalized") * keys.unit).sum(-1)
    truth = truth.masked_fill(~keys.occupied, -torch.inf)
    return assert_within(actual, truth, keys.pairwise_error(), what="pairwise score")


def assert_kept_right(kept: Tensor, case: KeyCase) -> Verdict:
    """kept: the slots [B, Hkv, N] of an eviction with the case's inputs."""
    mask = case.mask
    return compare.assert_kept_right(
        kept, oracle(keydiff.evict, case).kept, rank_interval(case), occupied=mask,
        protected=case.protected_or_recent, window=0, tie=equal_keys(case.key, mask),
    )


def assert_evict_right(actual: Any, case: KeyCase) -> Verdict:
    """actual: `evict(**case.inputs)`. `kept` must be a right choice, and the other fields exact copies by `kept`."""
    key, value, kept, occupied = actual
    verdict = undecided()
    with field("kept"):
        verdict = assert_kept_right(kept, case)
    for name, tensor, source in (("key", key, case.key), ("value", value, case.value)):
        with field(name):
            assert_dtype(tensor, case.dtype, what=f"kept {name}")
            assert_same(tensor, gathered(source, kept), what=f"kept {name}")
    with field("occupied"):
        assert_dtype(occupied, torch.bool, what="occupied")
        assert_same(occupied, kept >= 0, what="occupied")
    return verdict


def assert_paged_evict_right(actual: Any, case: KeyCase, where: str = "") -> Verdict:
    """actual: what `paged_evict` returns for the case in pages. `kept` must be a right choice; `occupied` are the slots
    that it names, and `slot` is the lowest other one. where: for messages, such as " in pages of 16"."""
    kept, occupied, slot = actual
    verdict = undecided()
    with field("kept"):
        verdict = assert_kept_right(kept, case)
    with field("occupied"):
        assert_dtype(occupied, torch.bool, what="occupied")
        assert_same(occupied, _named(kept, case), what=f"occupied{where}")
    with field("slot"):
        assert_dtype(slot, torch.int64, what="slot")
        free = torch.arange(case.slots, device=kept.device).where(~_named(kept, case), case.slots).amin(-1)
        assert_same(slot, free.where(free < case.slots, -1), what=f"slot{where}")
    return verdict


def _named(kept: Tensor, case: KeyCase) -> Tensor:
    """The slots [B, Hkv, S] bool that `kept` [B, Hkv, N] names."""
    return (kept[..., None, :] == torch.arange(case.slots, device=kept.device)[:, None]).any(-1)


def _judge_score(actual: Tensor, case: KeyCase) -> None:
    with field("score"):
        assert_score_right(actual, case)


def _judge_pairwise(actual: Tensor, case: KeyCase) -> None:
    with field("score"):
        assert_pairwise_right(actual, case)


def _subjects() -> Iterator[Subject]:
    kinds: dict[str, Any] = {
        "extreme": ("sizes", "subnormal", "outliers", "zero_keys"), "full": "none", "masked": OCCUPANCIES[1:],
    }
    tied, protect = ("duplicates", "equal_keys"), tuple(dict.fromkeys(PROTECTIONS))
    numbers, choices = aspects(**kinds, protect=("none",)), aspects(**kinds, tied=tied, protect=protect)
    layout: dict[str, Any] = {"layout": PAGED, "paged": True}
    paged_numbers = aspects(**kinds, protect=("none",), **layout)
    paged_choices = aspects(**kinds, tied=tied, protect=protect, **layout)
    kinds_of_keys: tuple[tuple[type[Subject], Any, Any, dict[str, Any]], ...] = (
        (Subject, key_cases, paged_key_cases, {}), (Fp8Subject, fp8_key_cases, paged_fp8_key_cases, {"scales": ()}),
    )
    for made, cases, paged, more in kinds_of_keys:
        yield made("score", cases, _judge_score, numbers=("score",), aspects=numbers,
                   inputs=lambda case: case.score_inputs, **more)
        yield made("pairwise_score", cases, _judge_pairwise, numbers=("score",), aspects=numbers,
                   inputs=lambda case: case.pairwise_inputs, **more)
        yield made("evict", cases, assert_evict_right, numbers=("key", "value", "occupied"), choices=("kept",),
                   aspects=choices, recorded=None if more else recorded.keys, **more)
        more |= {"also": True, "arguments": with_pages}
        yield made("paged_score", paged, _judge_score, numbers=("score",), aspects=paged_numbers,
                   inputs=lambda case: case.paged_score_inputs, **more)
        yield made("paged_evict", paged, assert_paged_evict_right, numbers=("occupied", "slot"), choices=("kept",),
                   aspects=paged_choices, inputs=lambda case: case.paged_inputs, **more)


SUBJECTS = tuple(_subjects())


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    assert isinstance(case, KeyCase)
    if isinstance(case, PagedKeyCase):
        assert_score_right(module.paged_score(**with_pages(case.paged_score_inputs)), case)
        yield "paged_score: right"
        assert_paged_evict_right(module.paged_evict(**with_pages(case.paged_inputs)), case)
        yield "paged_evict: right"
        return
    assert_score_right(module.score(**case.score_inputs), case)
    yield "score: right"
    assert_pairwise_right(module.pairwise_score(**case.pairwise_inputs), case)
    yield "pairwise_score: right"
    assert_evict_right(module.evict(**case.inputs), case)
    yield "evict: right"


# The state -----------------------------------------------------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    config = draw(blocks.block_configs(most))
    # A block costs many launches, so most blocks are long and a prompt has few of them.
    config["block_size"] = draw(st.integers(most - 1, 2 * most) | st.just(config["block_size"]))
    own = draw(st.sampled_from((True, True, True, False)))
    return {
        **config,
        "recent": draw(st.sampled_from(draws.plain_among((0, 0, 1, config["budget"]), (0, 1)))),
        "anchor": ANCHORS[0] if own else draw(st.sampled_from(ANCHORS)),
        "similarity": SIMILARITIES[0] if own else draw(st.sampled_from(SIMILARITIES)),
        "refresh": draw(st.integers(1, 4)),
    }


class Drift:
    """The error of a sum of normalised keys that is carried from step to step and recomputed every `refresh` steps.

    A step adds the new key to the sum, ranks by it, and subtracts the evicted key. So each step adds to the initial
    error: the errors of the new and of the evicted key (which need not be computed in the same way), and a rounding of
    each of the two sums. At any step the sum may have been recomputed at any of the last `refresh` steps, or now: the
    largest of these errors is allowed. A block of several tokens recomputes the sum.
    """

    # Of the last chunk: the sum, the number of keys in it, and the most of one key that may flush to zero.
    total: Tensor
    num_keys: Tensor
    vanished: Tensor

    def __init__(self, refresh: int) -> None:
        self.refresh = refresh
        #: Errors [B, W, Hkv, 1, D] by the step at which the sum was recomputed, the oldest first.
        self.errors: Tensor | None = None

    def after(self, keys: Keys, fresh: Tensor) -> Tensor:
        """The bound after this chunk, [B, Hkv, 1, D]. fresh [B, Hkv, S] bool: the tokens of the chunk."""
        term = (1 + keys.own) * (1 + keys.common) - 1
        total, num_keys = keys.unit.sum(2, keepdim=True), keys.occupied.sum(-1)[..., None, None]
        arrived = (keys.unit * fresh[..., None]).sum(2, keepdim=True)
        vanished = keys.vanished.amax(2, keepdim=True)
        recomputed = keys.unit_sum_error[:, None]
        if self.errors is None or not bool((fresh.sum(-1) <= 1).all()):
            self.errors = recomputed
        else:
            before = total - arrived                                                    # after the last step's eviction
            gone = term * (self.total - before).abs() + self.vanished
            left = (self.num_keys > num_keys - fresh.sum(-1)[..., None, None])[:, None]
            error = self.errors[:, -self.refresh:]
            subtracted = error + gone[:, None]
            subtracted = subtracted + UNIT * (before.abs()[:, None] + subtracted)
            error = torch.where(left, subtracted, error) + (term * arrived.abs() + vanished)[:, None]
            error = (error + UNIT * (total.abs()[:, None] + error)) * SLACK
            self.errors = torch.cat((error, recomputed), 1)
        self.total, self.num_keys, self.vanished = total, num_keys, vanished
        return self.errors.amax(1)

    def reorder(self, index: Tensor) -> None:
        if self.errors is not None:
            for name in ("errors", "total", "num_keys", "vanished"):
                setattr(self, name, getattr(self, name).index_select(0, index))


class Adapter(blocks.Adapter):
    """Scores and ranks of all cached tokens, recomputed at every chunk, by an anchor that may be carried along."""

    drift: Drift | None = None

    def score_error(self, chunk: Chunk) -> Tensor:
        config, before = chunk.reference.config, chunk.before
        key = keydiff.occupied_keys(before["key"], before["occupied"])
        keys = Keys(key, before["occupied"], config.anchor)
        fresh = torch.zeros_like(before["occupied"])
        fresh[..., config.budget:] = before["occupied"][..., config.budget:]
        self.drift = self.drift or Drift(config.refresh)
        self.keys = Keys(key, before["occupied"], config.anchor, self.drift.after(keys, fresh))
        return score_error(self.keys, config.similarity)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        rank, lost = chunk.before["rank"], rank_error(self.keys, chunk.reference.config.similarity)
        return Interval(rank - lost, rank + lost)

    def ties(self, chunk: Chunk) -> Tensor:
        return equal_keys(chunk.before["key"], chunk.before["occupied"])

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        if self.drift is not None:
            self.drift.reorder(index)

    def reset(self) -> None:
        super().reset()
        self.drift = None
