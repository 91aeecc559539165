"""Numbers of slots at which tiles, splits and loops of kernels end, for the functions of every method.

A case of each size, with one row and one KV head, so that even an interpreted kernel takes a fraction of a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .. import capabilities
from ..cases import draws, supported
from ..cases.case import Case
from ..cases.layouts import GUARDED
from ..cases.strategies import DTYPES
from .subjects import Subject

#: Around the powers of two that are sizes of tiles, and what is no multiple of any of them.
SIZES = (
    31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 299, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4097,
)
#: Query heads per KV head, in turns on a CPU.
GROUPS = (1, 2, 3)
#: What a case has besides slots or tokens, as a function of their number. Of others it has what is drawn.
PARTS = {
    "budget": lambda size: size // 2, "observers": lambda size: min(size, 8), "queries": lambda size: min(size, 3),
    "keep": lambda size: (size - 1, 3, size // 2, size + 2)[size // 3 % 4],
}


def cases(subject: Subject, data: Any) -> Iterator[Case]:
    """A case of each size that the implementation declares, with ordinary contents in turn. Every other one, but for
    those in pages, ends where its memory ends. On a GPU, all have the dtype and the dimensions of one."""
    assert subject.sized is not None
    # Where one token dominates, the last one has no weight, and whether it was read does not show.
    contents = [one for one in subject.properties["accuracy"].get("content", ()) if one != "dominant"]
    first: Case | None = None
    for number, size in enumerate(_declared()):
        with draws.usual_shape():
            case: Case = data.draw(subject.draw("accuracy", **{subject.sized: (size, size)}))
        first = first or case
        changes: dict[str, Any] = {"batch": 1, "key_value_heads": supported.sizes("kv_heads", (1,))[0], "seed": size}
        if case.device.startswith("cpu"):
            changes |= {"head_dim": supported.sizes("head_dims", (16,))[0],
                        "group": supported.sizes("groups", GROUPS)[number % 3 if _any("groups") else 0]}
            changes |= {"dtype": _dtype(number)} if case.dtype in DTYPES else {}
        else:
            changes |= {name: getattr(first, name) for name in ("head_dim", "group", "dtype")}
        changes |= {"content": contents[number % len(contents)]} if contents else {}
        names = {one.name for one in dataclasses.fields(case)}
        changes |= {name: part(size) for name, part in PARTS.items() if name in names}
        in_pages = "last_page" in names
        if in_pages and capabilities.current().slots_multiple_of == 1:
            changes |= {"last_page": "partial", subject.sized: size}
        if number % 2 and not in_pages and getattr(case, "layout", "") == "contiguous":
            changes["layout"] = GUARDED
        yield dataclasses.replace(case, **changes)


def _declared() -> list[int]:
    """The sizes, rounded up to a declared multiple."""
    can = capabilities.current()
    unit = can.slots_multiple_of
    rounded = dict.fromkeys(-(-size // unit) * unit for size in SIZES)
    return [size for size in rounded if can.max_slots is None or size <= can.max_slots]


def _any(name: str) -> bool:
    return getattr(capabilities.current(), name) is None


def _dtype(number: int) -> Any:
    declared = supported.dtypes(DTYPES)
    return declared[number % len(declared)]
