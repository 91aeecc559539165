"""Judging a large result a few rows at a time, so that what the oracle computes in float64 fits into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..cases.case import Case
from . import mismatch

#: The most elements of a float64 tensor of the oracle: 2 GB. The bounds of a piece hold about a dozen of them.
MOST_ELEMENTS = 2**28


def elements_of_row(case: Case) -> int:
    """The elements of the oracle's largest tensors, [Hq, S, D] of values and [Hq, Q, S] of weights, for one row. There
    are about four times as many tensors of the second kind at once."""
    slots = getattr(case, "slots", getattr(case, "tokens", 1))
    queries = max(getattr(case, "queries", 1), getattr(case, "observers", 1))
    return case.query_heads * slots * max(case.head_dim, 4 * queries)


def split(case: Case, result: Any) -> Iterator[tuple[Case, Any]]:
    """The case and its result, by rows if they are large. The first axis of all their tensors, but for scales, is the
    batch; a result of another form is not divided, so that its own check can say what is wrong."""
    rows = max(1, MOST_ELEMENTS // elements_of_row(case))
    if rows >= case.batch or not _has_rows(result, case.batch):
        yield case, result
        return
    for start in range(0, case.batch, rows):
        part = slice(start, min(start + rows, case.batch))
        with mismatch.in_place(f"rows {part.start} to {part.stop - 1} of {case.batch}, counted from {part.start}"):
            yield _case(case, part), _result(result, part)


def _has_rows(result: Any, batch: int) -> bool:
    found = result if isinstance(result, tuple) else (result,)
    return all(one.dim() > 0 and len(one) == batch for one in found if isinstance(one, Tensor))


def _case(case: Case, rows: slice) -> Case:
    made = dataclasses.replace(case, batch=rows.stop - rows.start)
    made.part_of(case, {
        name: tensor if tensor is None or name.endswith("_scale") or tensor.dim() == 0 else tensor[rows]
        for name, tensor in case.tensors.items()
    })
    return made


def _result(result: Any, rows: slice) -> Any:
    if isinstance(result, Tensor):
        return result[rows]
    return type(result)(*(one[rows] if isinstance(one, Tensor) else one for one in result))
