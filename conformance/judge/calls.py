"""What one call of a function must not do to another, or one row to another row: results are compared bit by bit.

Between two calls the contents of the inputs change in place, and neither the tensors, nor their addresses, nor their
versions do: `Tensor.data` has a version of its own. So a result that was stored by any of them is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import stats
from ..cases import failures
from ..cases.case import Case
from .compare import assert_same, fail
from .subjects import Subject
from .unchanged import unchanged


def leaves_nothing_behind(subject: Subject, module: Any, case: Case) -> None:
    """The same call gives the same bits. It changes neither its inputs nor the results of earlier calls, and remembers
    nothing of tensors whose contents change. Raises compare.Mismatch."""
    with failures.judging(str(subject)):
        others = subject.inputs(subject.other(case))
        inputs = subject.inputs(case)  # last, since a failure saves the case that was used last
        results = [returned_tensors(subject, module, inputs)]
        expected = copies(results[0])

        def call(given: dict[str, Any], wanted: dict[str, Tensor] | None, why: str) -> None:
            results.append(returned_tensors(subject, module, given))
            if wanted is not None:
                assert_same_launch(results[-1], wanted, why)

        call(inputs, expected, "of the same call again")
        call(others, None, "")
        changed, mine = copies(results[-1]), copies(inputs)
        assert_same_fields(results[0], expected, "of the first call, after another one")
        call(mine, expected, "of a call with copies")
        set_contents(mine, others)
        call(mine, changed, "after the contents of the inputs changed, in the same memory")
        assert_own_memory(results, {"argument": inputs, "argument of another call": others})
        if case.device.startswith("cuda"):
            set_contents(mine, inputs)
            assert_same_fields(_unfinished(subject, module, mine, others), changed, UNFINISHED)
    stats.judged_case(case, str(subject))


#: Of a result that is read at once, in the order of the current stream.
UNFINISHED = "read on the current stream right after the call (is work left on another stream?)"


def _unfinished(subject: Subject, module: Any, inputs: dict[str, Any], others: dict[str, Any]) -> dict[str, Tensor]:
    """The result of a call as work finds it that the current stream does next. The GPU is busy when the call is made,
    and then gets the call's inputs: the contents of `others`."""
    torch.cuda._sleep(BUSY)
    set_contents(inputs, others)
    found = copies(fields_of(subject.result(module, inputs)))
    torch.cuda.synchronize()
    return found


#: Cycles of a GPU's clock, about 10 ms.
BUSY = 20_000_000


def set_contents(inputs: dict[str, Any], others: dict[str, Any]) -> None:
    """Copy the contents of `others` into the memory of `inputs`, without a trace in their versions."""
    for name, tensor in tensors(others).items():
        inputs[name].data.copy_(tensor)


def assert_own_memory(results: Sequence[dict[str, Tensor]], inputs: dict[str, dict[str, Any]]) -> None:
    """No field of a result lies in the memory of an input, or of the result of an earlier call: the caller may change
    those. inputs: the arguments of calls, by what they are called."""
    owners: dict[int, str] = {}
    for what, given in inputs.items():
        for name, tensor in tensors(given).items():
            owners.setdefault(tensor.untyped_storage().data_ptr(), f"the {what} {name}")
    for result in results:
        places = {name: tensor.untyped_storage().data_ptr() for name, tensor in result.items() if tensor.numel()}
        for name, place in places.items():
            if place in owners:
                fail(f"{name} lies in the memory of {owners[place]}: who changes one changes the other")
        owners |= {place: f"the {name} of an earlier call" for name, place in places.items()}


def remembers_no_contents(subject: Subject, module: Any, case: Case) -> None:
    """A call with the contents of an earlier one, in other memory, does as much as any other call. Raises
    compare.Mismatch.

    What is counted are the functions that it calls, from Python, in each of three pairs of calls with the same
    contents. Counts that differ for other reasons do not drop in the second call of every pair below the least of all
    first ones.
    """
    with failures.judging(str(subject)), stats.counting_work() as counts:
        for number in (0, 2, 3, 4):  # the first pair allocates, and compiles; 1 is `Subject.other`
            inputs = subject.inputs(dataclasses.replace(case, seed=case.seed ^ number))
            for _ in range(2):
                returned_tensors(subject, module, copies(inputs))
        first, second = counts[2::2], counts[3::2]
        if first and max(second) < min(first):
            fail(
                f"a call with the contents of an earlier one calls {max(second)} functions, and the earlier one called "
                f"{min(first)}: it looks up the result"
            )


def rows_are_apart(subject: Subject, module: Any, case: Case) -> None:
    """Each row has the same result if all other rows hold NaN. Raises compare.Mismatch."""
    with failures.judging(str(subject)):
        inputs = subject.inputs(case)
        expected = returned_tensors(subject, module, inputs)
        for row in {0, case.batch - 1}:
            alone = _without_others(inputs, row)
            assert_same_launch(
                {name: tensor[row] for name, tensor in returned_tensors(subject, module, alone).items()},
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


def returned_tensors(subject: Subject, module: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
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
