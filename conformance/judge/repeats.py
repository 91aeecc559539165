"""Launching the same call often, on a GPU: it must give the same bits each time.

What differs between launches is what a kernel might depend on and must not: other work on the GPU, the contents and the
addresses of memory, the way in which it is launched, the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import stats
from ..cases import failures
from ..cases.case import Case
from ..cases.graphs import capture
from ..cases.load import FILLS, Load, memory_filled_with, scatter_allocations
from ..cases.state_trace import StateTrace
from . import fresh
from .calls import copies, fields_of, returned_tensors, set_contents
from .compare import fail
from .fresh import bits
from .subjects import StateSubject, Subject

#: Launches one after another, beside work on a second stream, on a second stream, with other contents and addresses of
#: memory, from a graph.
IDLE, LOADED, APART, ELSEWHERE, REPLAYED = 40, 30, 10, 15, 20
#: Launches of a small call: if 1 launch in 1,000 is wrong, none of so many is with a probability of 5 %.
OFTEN = 3000
OUT_OF_MEMORY = torch.OutOfMemoryError.__name__

Fields = dict[str, Tensor]


def assert_repeats(subject: Subject, module: Any, case: Case, process: fresh.Process) -> None:
    """Launch the function's call with the inputs of a case more than 100 times, and once in another process. Raises
    compare.Mismatch."""
    with failures.judging(str(subject)):
        inputs = subject.inputs(case)

        def call() -> Fields:
            return fields_of(subject.result(module, inputs))

        expected = copies(returned_tensors(subject, module, inputs))
        process.ask(str(subject), case)
        try:
            for how, launches in _ways(call, torch.device(case.device)):
                _assert_same_bits(launches, expected, how)
                if case.device != "cpu":
                    torch.cuda.empty_cache()        # the allocator keeps memory for each stream, and others need some
        finally:
            answer = process.answer()
        if OUT_OF_MEMORY in answer.get("error", ""):        # this process has what it needs
            torch.cuda.empty_cache()
            process.ask(str(subject), case)
            answer = process.answer()
        wrong = [name for name, digest in fresh.digests(expected).items() if answer.get(name) != digest]
        if wrong:
            fail(f"{', '.join(wrong)} of a launch in a fresh process: {answer.get('error', 'other bits than here')}")
        stats.launches(1)
    stats.judged_case(case, str(subject))


def assert_repeats_often(subject: Subject, module: Any, case: Case, count: int | None = None) -> None:
    """Launch the function's call `count` times, by default OFTEN times, and then with other contents, in the same
    memory and in other memory. Raises compare.Mismatch."""
    with failures.judging(str(subject)):
        others, inputs = subject.inputs(subject.other(case)), copies(subject.inputs(case))
        other = copies(returned_tensors(subject, module, others))
        expected = copies(returned_tensors(subject, module, inputs))
        launches = (fields_of(subject.result(module, inputs)) for _ in range(count or OFTEN))
        _assert_same_bits(launches, expected, "of launches one after another")
        set_contents(inputs, others)
        late = (fields_of(subject.result(module, given)) for given in (inputs, others))
        _assert_same_bits(late, other, f"with other contents, after {count or OFTEN} launches,")
    stats.judged_case(case, str(subject))


def _ways(call: Callable[[], Fields], device: torch.device) -> Iterator[tuple[str, Iterator[Fields]]]:
    load = Load(device, seed=0)

    def loaded() -> Fields:
        load.add()
        return call()

    yield "of launches one after another", (call() for _ in range(IDLE))
    yield "of launches beside another stream", (loaded() for _ in range(LOADED))
    other = torch.cuda.Stream(device) if device.type == "cuda" else None   # of which the allocator keeps the memory
    yield "of launches on another stream", (_apart(call, device, other) for _ in range(APART))
    yield "of launches with other contents of memory", (_elsewhere(call, number, device) for number in range(ELSEWHERE))
    graph = _captured(call, device)
    if graph is not None:
        yield "of replays of a CUDA graph", graph


def _apart(call: Callable[[], Fields], device: torch.device, stream: Any) -> Fields:
    if stream is None:
        return call()
    here = torch.cuda.current_stream(device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        found = call()
    here.wait_stream(stream)
    for tensor in found.values():
        tensor.record_stream(here)
    return found


def _elsewhere(call: Callable[[], Fields], number: int, device: torch.device) -> Fields:
    held = scatter_allocations(device, number)
    with memory_filled_with(FILLS[number % len(FILLS)]):
        found = call()
    del held
    return found


def _captured(call: Callable[[], Fields], device: torch.device) -> Iterator[Fields] | None:
    """Replays of the call as a CUDA graph; None where it cannot be captured, which no implementation has to support."""
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(device).wait_stream(side)
        with capture(graph):
            found = call()
    except Exception:  # whatever its code does that a graph does not allow
        torch.cuda.synchronize(device)
        return None

    def replays() -> Iterator[Fields]:
        for _ in range(REPLAYED):
            graph.replay()
            yield found

    return replays()


def _assert_same_bits(launches: Iterator[Fields], expected: Mapping[str, Tensor], how: str) -> None:
    """Nothing waits for the GPU until all launches are made, so that one may begin before the last has ended."""
    differs = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in expected.items()}
    wrong = {name: torch.zeros((), dtype=torch.int64, device=tensor.device) for name, tensor in expected.items()}
    count = 0
    for fields in launches:
        count += 1
        if fields.keys() != expected.keys():
            fail(f"fields {how}: expected {', '.join(expected)}, got {', '.join(fields)}")
        for name, tensor in fields.items():
            if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
                fail(f"{name} {how}: expected {expected[name].dtype} of shape {tuple(expected[name].shape)}, got "
                     f"{tensor.dtype} of {tuple(tensor.shape)}".replace("torch.", ""))
            other = bits(tensor) != bits(expected[name])
            differs[name] |= other
            wrong[name] += other.any()
    stats.launches(count)
    for name, mask in differs.items():
        launched = int(wrong[name])
        if launched:
            at = tuple(mask.nonzero()[0].tolist())
            fail(f"{name} {how}: {launched} of {count} launches have other bits than the first one, in "
                 f"{int(mask.sum())} of {mask.numel()} elements; the first, at {at}")


def assert_state_repeats(subject: StateSubject, module: Any, trace: StateTrace, make: Callable[[], Any]) -> None:
    """Run a state through a trace three times: alone, beside another stream, and with other contents of memory. Its
    outputs have the same bits. make: a new state. Raises compare.Mismatch."""
    load = Load(torch.device(trace.device), seed=0)

    def outputs(before: Callable[[], None], fill: int | None) -> Iterator[Fields]:
        with nullcontext() if fill is None else memory_filled_with(fill):
            state = make()
            yield from _played(state, trace, before)

    with failures.judging(str(subject)):
        expected = [copies(fields) for fields in outputs(lambda: None, None)]
        for how, before, fill in (("beside another stream", load.add, None), ("with other memory", load.add, 0xFF)):
            for number, fields in enumerate(outputs(before, fill)):
                _assert_same_bits(iter([fields]), expected[number], f"of launch {number} {how}")
    stats.judged_case(trace, str(subject))


def _played(state: Any, trace: StateTrace, before: Callable[[], None]) -> Iterator[Fields]:
    from . import checkers

    prompt = trace.prompt_inputs
    if prompt is not None:
        given = {name: tensor for name, tensor in prompt.items() if tensor is not None}
        more = checkers.extras(state, prompt["query"], prompt["key"], prompt["value"])
        yield {"output": state.prefill(**given, **more)}
    for step in range(trace.steps):
        before()
        token = trace.step_inputs(step)
        yield {"output": state.step(**token, **checkers.extras(state, **token))}
