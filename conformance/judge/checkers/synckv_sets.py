"""Checker of SyncKV's functions: the tokens that a head may choose, by intervals of its log-weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....reference import synckv
from ...cases.contents import OCCUPANCIES
from ...cases.oracle import upcast_all
from ...cases.synckv_cases import SetsCase, sets_cases
from ..bounds import Arithmetic, Interval, arithmetic, log_weight_error
from ..compare import fail, named
from ..fields import Missing, field
from ..selections import assert_selected_right
from ..subjects import TIED, Subject, properties
from ..ties import tie_classes


def weight_interval(case: SetsCase, allowed: Arithmetic | None = None) -> Interval:
    """Interval of the log of each token's pooled weight, [B, N_r, S]; -inf in free slots.

    log a_hj has the error `log_weight_error`, and the maximum over a group is within the maxima of the ends.
    """
    attention = case.attention
    error = log_weight_error(attention, allowed or arithmetic(case.dtype))
    exact = (attention.logit - attention.lse).masked_fill(~attention.seen, 0)             # [B, Hq, 1, S]
    groups = (case.key_value_heads, case.group)
    return Interval(*(
        (exact + side).masked_fill(~attention.seen, -torch.inf)[:, :, 0].unflatten(1, groups).amax(2) for side in error
    ))


def free_of(case: SetsCase, taken: Tensor | None) -> Tensor:
    """The tokens that can be chosen, [B, N_r, S] bool."""
    occupied: Tensor = case.occupied[:, None].expand(-1, case.key_value_heads, -1)
    return occupied if taken is None else occupied & ~named(taken, case.slots)


def assert_chosen_right(actual: Tensor, truth: Tensor, case: SetsCase, taken: Tensor | None, *, what: str) -> None:
    """Assert that actual [B, N_r, count] holds the best tokens (the lowest index in a tie), ascending, then -1."""
    if actual.dtype != torch.int64 or tuple(actual.shape) != tuple(truth.shape):
        fail(f"{what}: expected int64 of shape {tuple(truth.shape)}, got {actual.dtype} of {tuple(actual.shape)}")
    if actual.shape[-1] == 0:
        return
    free = free_of(case, taken)
    assert_selected_right(
        actual, truth, weight_interval(case), candidates=free,
        tie=tie_classes(case.key, torch.ones_like(case.key), free, per_head=True), what=what,
    )


def assert_initial_right(actual: Any, case: SetsCase) -> None:
    """actual: `initial_sets(**case.inputs)`. The dynamic set is checked given the actual static set, if that is one."""
    static, dynamic = actual
    exact = upcast_all(case.inputs)
    truth = synckv.initial_sets(**exact)
    with field("static"):
        assert_chosen_right(static, truth.static, case, None, what="static")
    taken = static if _are_tokens(static, truth.static, case.slots) else truth.static
    rest = {name: exact[name] for name in ("query", "key", "occupied", "scale")}
    expected = synckv.anticipate(**rest, static=taken, k_dynamic=truth.dynamic.shape[-1])
    with field("dynamic"):
        assert_chosen_right(dynamic, expected, case, taken, what="dynamic")


def _are_tokens(static: Any, expected: Tensor, slots: int) -> bool:
    """True if a static set has the right shape and names distinct slots."""
    if isinstance(static, Missing) or static.dtype != torch.int64 or static.shape != expected.shape:
        return False
    if not bool(((static >= -1) & (static < slots)).all()):
        return False
    ordered = static.sort(-1).values
    return not bool(((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)).any())


def assert_anticipation_right(actual: Tensor, case: SetsCase) -> None:
    """actual: `anticipate(**case.step_inputs)`."""
    truth = synckv.anticipate(**upcast_all(case.step_inputs))
    with field("dynamic"):
        assert_chosen_right(actual, truth, case, case.static if case.exclude_static else None, what="dynamic")


def _subjects() -> Iterator[Subject]:
    found = properties(
        tied=TIED, extreme=("overflow_88", "extreme_1e4", "many_87", "all_below_104", "zero_query"),
        masked=OCCUPANCIES[1:],
    )
    yield Subject("initial_sets", sets_cases, assert_initial_right, choices=("static", "dynamic"), properties=found)
    yield Subject("anticipate", sets_cases, assert_anticipation_right, choices=("dynamic",), properties=found,
                  inputs=lambda case: case.step_inputs, also=True)  # fmt: skip


SUBJECTS = tuple(_subjects())


def replay(case: SetsCase, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    assert_initial_right(module.initial_sets(**case.inputs), case)
    yield "initial sets"
    assert_anticipation_right(module.anticipate(**case.step_inputs), case)
    yield "anticipation"
