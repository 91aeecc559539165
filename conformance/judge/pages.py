"""The judge of functions over pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..cases.case import DecodeCase
from ..cases.key_cases import KeyCase
from ..cases.paged_view import LAYOUTS, PagedLayout, PagedView, paged_views
from . import bounds
from .checkers import keydiff, longflow
from .compare import assert_dtype, assert_same, assert_within


def judge_paged(
    case: DecodeCase | KeyCase, function: Callable[[PagedView], Any], layouts: Sequence[PagedLayout] = LAYOUTS
) -> list[str]:
    """Judge what a function returns for a case in each layout. Returns a line per layout; raises Mismatch.

    function: takes a PagedView. For a DecodeCase, it returns the output [B, Hq, D] of attention, or LongFlow's output,
    score and slot, over the case's slots. For a KeyCase, it returns KeyDiff's score [B, Hkv, S], or the kept slots, the
    slots that remain occupied, and the lowest free slot (see `PagedEvictResult`). The results must be right, and have
    the same bits in every layout.
    """
    passed: list[str] = []
    first: tuple[Tensor, ...] = ()
    for view in paged_views(case, layouts):
        returned = function(view)
        results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        if isinstance(case, KeyCase):
            names = _judge_keys(results, case, view.layout)
        else:
            names = _judge_step(results, case, view.layout)
        for name, mine, other in zip(names, results, first, strict=False):
            assert_same(mine, other, what=f"{name} in {view.layout}, compared with the first layout")
        first = first or results
        changed = {
            field.name: value for field in dataclasses.fields(view.layout)
            if (value := getattr(view.layout, field.name)) != field.default
        }
        passed.append(f"pages of {view.layout.page_size} {changed or ''}".rstrip() + ": right")
    return passed


def _judge_step(results: tuple[Tensor, ...], case: DecodeCase, layout: PagedLayout) -> tuple[str, ...]:
    """Returns the names of the results."""
    if len(results) == 1:
        assert_dtype(results[0], case.dtype, what="output")
        truth = case.attention.output[:, :, 0]
        assert_within(results[0], truth, bounds.decode_output(case), what=f"output in {layout}")
    else:
        longflow.assert_decode_right(results, case)
    return "output", "score", "slot"


def _judge_keys(results: tuple[Tensor, ...], case: KeyCase, layout: PagedLayout) -> tuple[str, ...]:
    """Returns the names of the results."""
    if len(results) == 1:
        keydiff.assert_score_right(results[0], case)
        return ("score",)
    keydiff.assert_paged_evict_right(results, case, f" in {layout}")
    return "kept", "occupied", "slot"
