"""Many decisions and many launches of small calls: what is wrong once in a hundred times is found on a CPU, too.

A call with 64 rows of a few tokens judges 64 decisions or more, and costs an interpreted kernel less than a tenth of a
second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..cases import draws, supported
from ..cases.case import Case
from .served import number_of
from .subjects import Subject

#: Rows of a case, and its slots or tokens: a few more or less than the last tile of most kernels has room for.
ROWS, SLOTS = 64, (14, 18)
#: Cases in each dtype. If 1 row in 100 is wrong, none of 6 x 64 rows is with a probability of 2 %.
CASES = 2
#: Launches. If 1 launch in 100 is wrong, none of so many is with a probability of 5 %.
LAUNCHES, FEW_LAUNCHES = 300, 20


def cases(subject: Subject, data: Any) -> Iterator[Case]:
    """Cases of ROWS rows in each declared dtype; with the profile quick, one."""
    assert subject.sized is not None
    found = [dtype for dtype in subject.dtypes for _ in range(CASES)]
    for number, dtype in enumerate(found[:1] if draws.is_quick() else found):
        with supported.only_dtype(dtype), draws.usual_shape():
            case: Case = data.draw(subject.draw("decisions", **{subject.sized: SLOTS}))
        yield _small(case, supported.rows(ROWS), number_of(subject, "rows", number))


def one(subject: Subject, data: Any) -> Case:
    """A case that is launched often."""
    assert subject.sized is not None
    with draws.usual_shape():
        case = data.draw(subject.draw("repeatability", **{subject.sized: SLOTS}))
    return _small(case, 1, number_of(subject, "launches"))


def _small(case: Any, rows: int, seed: int) -> Any:
    """The case with other rows; on a CPU with one head and few channels."""
    changes: dict[str, Any] = {"batch": rows, "seed": seed % 2**31}
    if case.device.startswith("cpu"):
        for name, declared, usual in (
            ("key_value_heads", "kv_heads", 1), ("group", "groups", 1), ("head_dim", "head_dims", 16)
        ):
            if name not in case.fixed:
                changes[name] = supported.sizes(declared, (usual,))[0]
    return dataclasses.replace(case, **changes)


def launches() -> int:
    return FEW_LAUNCHES if draws.is_quick() else LAUNCHES
