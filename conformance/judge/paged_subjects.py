"""The subjects of a function over pages that a method of another package has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ...reference.contract import Pages
from ..cases.contents import OCCUPANCIES, PROTECTIONS
from ..cases.in_pages import PAGED, paged_decode_cases, paged_fp8_cases, with_pages
from .fields import field
from .fp8_subjects import Fp8Subject
from .subjects import EXTREME, TIED, Subject, properties

SCALES = ("key_scale", "value_scale")
#: What a function may have besides `pages`, `scale` and SCALES.
PARAMETERS = ("query", "occupied", "protected", "per_head")


def paged_subjects(
    name: str, judge: Callable[[Any, Any], Any], *, numbers: Collection[str] = ("output",),
    choices: Collection[str] = (), parameters: Collection[str] = ("query", "occupied"), fp8: bool = True,
) -> tuple[Subject, ...]:
    """What a method's checker has as SUBJECTS, so that the property tests judge a function over pages.

    name: of the function, which takes `pages` (`kvtwin.reference.longflow.Pages`), `scale` and these parameters:
    query [B, Hq, D], occupied and protected [B, S] bool ([B, Hkv, S] with per_head=True), per_head. fp8: it also takes
    FP8 caches, with key_scale and value_scale: float32, [] or [Hkv], absent if there is no scale.
    judge(result, case): raises Mismatch unless the result is right for a `PagedDecodeCase` or a `PagedFp8Case`.
    numbers: the result's fields that have error bounds; choices: those that are decisions. If there are several, judge
    checks each of them inside ``with field(name)``. ValueError for other parameters.
    """
    unknown = set(parameters) - set(PARAMETERS)
    if unknown:
        raise ValueError(f"parameters must be among {', '.join(PARAMETERS)}, got {', '.join(sorted(unknown))}")
    several = len(numbers) + len(choices) > 1
    names = {*parameters, "scale", *SCALES, *Pages._fields}

    def inputs(case: Any) -> dict[str, Any]:
        return {one: value for one, value in case.paged_inputs.items() if one in names}

    def judge_one(result: Any, case: Any) -> None:
        with field((*numbers, *choices)[0]):
            judge(result, case)

    given: dict[str, Any] = {} if "per_head" in parameters else {"per_head": False}
    given |= {} if "protected" in parameters else {"protect": ("none",)}
    of_cases = properties(
        tied=TIED if choices else (), extreme=EXTREME, masked=OCCUPANCIES[1:], layout=PAGED, paged=True,
        protect=PROTECTIONS if "protected" in parameters else (),
    )
    kinds: list[tuple[type[Subject], Any]] = [(Subject, paged_decode_cases), (Fp8Subject, paged_fp8_cases)]
    return tuple(
        made(
            name, partial(cases, **given), judge if several else judge_one, numbers=tuple(numbers),
            choices=tuple(choices), properties=of_cases, inputs=inputs, arguments=with_pages, also=False,
        )
        for made, cases in kinds[:2 if fp8 else 1]
    )
