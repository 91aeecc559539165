"""The judge of functions over pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..cases.case import DecodeCase
from ..cases.paged_view import LAYOUTS, PagedLayout, PagedView, paged_views
from . import bounds
from .checkers import longflow
from .compare import assert_dtype, assert_same, assert_within


def judge_paged(
    case: DecodeCase, function: Callable[[PagedView], Any], layouts: Sequence[PagedLayout] = LAYOUTS
) -> list[str]:
    """Judge what a function returns for a case in each layout. Returns a line per layout; raises Mismatch.

    function: takes a PagedView, and returns the output [B, Hq, D] of attention, or LongFlow's output, score and slot,
    over the case's slots. The results must be right, and have the same bits in every layout.
    """
    passed: list[str] = []
    first: tuple[Tensor, ...] = ()
    for view in paged_views(case, layouts):
        returned = function(view)
        if isinstance(returned, Tensor):
            assert_dtype(returned, case.dtype, what="output")
            truth = case.attention.output[:, :, 0]
            assert_within(returned, truth, bounds.decode_output(case), what=f"output in {view.layout}")
            results: tuple[Tensor, ...] = (returned,)
        else:
            results = tuple(returned)
            longflow.assert_decode_right(results, case)
        for name, mine, other in zip(("output", "score", "slot"), results, first, strict=False):
            assert_same(mine, other, what=f"{name} in {view.layout}, compared with the first layout")
        first = first or results
        changed = {
            field.name: value for field in dataclasses.fields(view.layout)
            if (value := getattr(view.layout, field.name)) != field.default
        }
        passed.append(f"pages of {view.layout.page_size} {changed or ''}".rstrip() + ": right")
    return passed
