"""What one call of a function must not do to another, or one row to another row: results are compared bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cases import failures
from ..cases.case import Case
from . import stats
from .compare import assert_same, fail
from .subjects import Subject
from .unchanged import unchanged


def leaves_nothing_behind(subject: Subject, module: Any, case: Case) -> None:
    """The same call gives the same bits. It changes neither its inputs nor the results of earlier calls, and remembers
    nothing of tensors whose contents change. Raises compare.Mismatch."""
    with failures.judging(str(subject)):
        others = subject.inputs(subject.other(case))
        inputs = subject.inputs(case)  # last, since a failure saves the case that was used last
        first = returned(subject, module, inputs)
        expected = copies(first)
        assert_same_launch(returned(subject, module, inputs), expected, "of the same call again")
        changed = copies(returned(subject, module, others))
        assert_same_fields(first, expected, "of the first call, after another one")
        mine = copies(inputs)
        assert_same_launch(returned(subject, module, mine), expected, "of a call with copies")
        for name, tensor in tensors(others).items():
            mine[name].copy_(tensor)
        assert_same_launch(returned(subject, module, mine), changed, "after the contents of the inputs changed")
    stats.judged_case(case, str(subject))


def rows_are_apart(subject: Subject, module: Any, case: Case) -> None:
    """Each row has the same result if all other rows hold NaN. Raises compare.Mismatch."""
    with failures.judging(str(subject)):
        inputs = subject.inputs(case)
        expected = returned(subject, module, inputs)
        for row in {0, case.batch - 1}:
            alone = _without_others(inputs, row)
            assert_same_launch(
                {name: tensor[row] for name, tensor in returned(subject, module, alone).items()},
                {name: tensor[row] for name, tensor in expected.items()},
                f"of row {row}, after all other rows became NaN",
            )
    stats.judged_case(case, str(subject))


def _without_others(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """The inputs with NaN in all rows but one, and in all pages but those of this row."""
    made, table = dict(inputs), inputs.get("block_table")
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or name.endswith("_scale"):
            continue
        others = torch.ones(len(value), dtype=torch.bool, device=value.device)
        own = table[row].long() if table is not None and name.endswith("_cache") else torch.tensor([row])
        others[own[own >= 0]] = False
        made[name] = _with_nan(value, others)
    return made


def _with_nan(tensor: Tensor, where: Tensor) -> Tensor:
    """The tensor with NaN where a mask of its first axis is True."""
    mask = where.view(-1, *[1] * (tensor.dim() - 1))
    if tensor.dtype.itemsize > 1:
        return tensor.masked_fill(mask, torch.nan)
    return tensor.view(torch.uint8).masked_fill(mask, 0x7F).view(tensor.dtype)  # NaN in each FP8 type


def returned(subject: Subject, module: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The fields of a call's result that are tensors. Raises unchanged.ChangedInput if the call changes the memory of
    its inputs."""
    with unchanged(inputs):
        result = subject.result(module, inputs)
    return fields_of(result)


def fields_of(result: Any) -> dict[str, Tensor]:
    """The tensors of a result, by field."""
    return {"result": result} if isinstance(result, Tensor) else tensors(result._asdict())


def tensors(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def copies(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def assert_same_fields(actual: dict[str, Tensor], expected: dict[str, Tensor], why: str) -> None:
    if actual.keys() != expected.keys():
        fail(f"fields {why}: expected {', '.join(expected)}, got {', '.join(actual)}")
    for name, tensor in expected.items():
        assert_same(actual[name], tensor, what=f"{name} {why}")


def assert_same_launch(actual: dict[str, Tensor], expected: dict[str, Tensor], why: str) -> None:
    """The same for the results of a call and of an earlier one, which is recorded."""
    assert_same_fields(actual, expected, why)
    stats.launches()
