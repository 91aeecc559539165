"""Checker of KeyDiff: its scores and choices; the running sum of a state, and its bound; configs to draw."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference import keydiff
from ....reference.contract import Pages
from ....reference.contract.scales import FP8
from ...cases import draws
from ...cases.case import Case
from ...cases.contents import OCCUPANCIES
from ...cases.in_pages import PAGED, PagedKeyCase, paged_fp8_key_cases, paged_key_cases, with_pages
from ...cases.key_cases import ANCHORS, PROTECTIONS, SIMILARITIES, KeyCase, fp8_key_cases, key_cases
from ...cases.oracle import oracle, upcast, upcast_all
from .. import choices, recorded
from ..bounds import SLACK, UNIT, Interval
from ..choices import Verdict, undecided
from ..compare import assert_dtype, assert_same, assert_within, gathered, named
from ..fields import field
from ..fp8_subjects import Fp8Subject
from ..subjects import Subject, properties
from ..ties import tie_classes
from ..variants import BLOCKS, ONE, variant
from . import blocks
from .blocks import Chunk
from .keydiff_bounds import Keys, rank_error, score_error

CASES = (KeyCase, PagedKeyCase)
#: Eq. 8. The window is an ablation (table 11).
DEFAULTS = {
    "recent": 0, "anchor": "mean_normalized", "similarity": "cosine", "block_size": 128, "refresh": 64,
    "softcap": None, "scale": None,
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


VARIANTS = (
    *BLOCKS,
    # Several tiles of each of the programs that share a row.
    variant("equal-keys-in-several-tiles", {"block_size": 300}, **ONE, content="equal_keys", budget=290, prompt=293,
            steps=3),
    *(variant(f"odd-keys-with-{recent}-recent", {"recent": recent, "refresh": 2}, content="odd_keys", steps=9)
      for recent in (0, 2)),
    variant("odd-keys-beside-free-slots", content="odd_keys", budget=24, padding="random", long=False),
    variant("recent-and-turns", {"recent": 3, "block_size": 4}, turns=((2, 3),), padding="random"),
    variant("mean-of-keys-of-any-size", {"anchor": "mean"}, content="rows_of_sizes", batch=3, padding="none"),
    *(variant(f"{anchor}-{similarity}", {"anchor": anchor, "similarity": similarity, "recent": number % 2})
      for number, (anchor, similarity) in enumerate(itertools.product(ANCHORS, SIMILARITIES)) if number),
    variant("carried-sums", {"refresh": 4}, steps=12),
    variant("pages", {"refresh": 3}, pages=4, steps=9, long=False),
    variant("pages-and-turns", {"anchor": "mean", "recent": 1}, pages=3, turns=((2, 3),), padding="random"),
    variant("pages-of-several-tiles", **ONE, pages=5, budget=70, prompt=75, steps=4),
)


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
    return choices.assert_kept_right(
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
        assert_same(occupied, named(kept, case.slots), what=f"occupied{where}")
    with field("slot"):
        assert_dtype(slot, torch.int64, what="slot")
        free = torch.arange(case.slots, device=kept.device).where(~named(kept, case.slots), case.slots).amin(-1)
        assert_same(slot, free.where(free < case.slots, -1), what=f"slot{where}")
    return verdict


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
    numbers, choices = properties(**kinds, protect=("none",)), properties(**kinds, tied=tied, protect=protect)
    layout: dict[str, Any] = {"layout": PAGED, "paged": True}
    paged_numbers = properties(**kinds, protect=("none",), **layout)
    paged_choices = properties(**kinds, tied=tied, protect=protect, **layout)
    kinds_of_keys: tuple[tuple[type[Subject], Any, Any, dict[str, Any]], ...] = (
        (Subject, key_cases, paged_key_cases, {}), (Fp8Subject, fp8_key_cases, paged_fp8_key_cases, {"scales": ()}),
    )
    for made, cases, paged, more in kinds_of_keys:
        yield made("score", cases, _judge_score, numbers=("score",), properties=numbers,
                   inputs=lambda case: case.score_inputs, **more)
        yield made("pairwise_score", cases, _judge_pairwise, numbers=("score",), properties=numbers, longest=3200,
                   inputs=lambda case: case.pairwise_inputs, **more)
        yield made("evict", cases, assert_evict_right, numbers=("key", "value", "occupied"), choices=("kept",),
                   properties=choices, recorded=None if more else recorded.keys, **more)
        more |= {"also": True, "arguments": with_pages}
        yield made("paged_score", paged, _judge_score, numbers=("score",), properties=paged_numbers,
                   inputs=lambda case: case.paged_score_inputs, **more)
        yield made("paged_evict", paged, assert_paged_evict_right, numbers=("occupied", "slot"), choices=("kept",),
                   properties=paged_choices, inputs=lambda case: case.paged_inputs, **more)


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
