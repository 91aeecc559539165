"""torch's requirements on the optimized side of every pair: opcheck, torch.compile without graph breaks, CUDA graphs.

These tests check our own kernels for any --kv-impl (see test_twins.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.graphs import capture
from kvtwin.conformance.cases.tiny import (
    attributes,
    calls,
    description,
    groupings,
    new_state,
    prompt,
    public_functions,
    states,
    token,
)
from kvtwin.conformance.discovery import Pair
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.lab.pool import one_rank
from kvtwin.optimized._common.block_cache.state import BlockState
from kvtwin.optimized._common.launch import INTERPRETED

pytestmark = pytest.mark.whole

#: Of operations: kvtwin's, and the names of other packages' methods.
NAMESPACES = ("kvtwin", *(pair.name for pair in discovery.methods() if pair.declared))
every_pair = pytest.mark.parametrize("twin", discovery.pairs(), ids=str)
every_method = pytest.mark.parametrize("twin", discovery.with_state(), ids=str)
every_state = pytest.mark.parametrize(("twin", "options"), states(), ids=str)


def assert_same_bits(actual: Any, expected: Any, what: str) -> None:
    """Assert that tensors, or tuples and dictionaries of them, are bitwise equal."""
    if isinstance(expected, Tensor):
        assert description(actual) == description(expected), what
        one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (actual, expected))
        assert torch.equal(one, other), f"{what} differs: {actual} and {expected}"
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(one, other, f"{what}[{number}]")
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_same_bits(actual[name], expected[name], f"{what}.{name}")
    else:
        assert actual == expected, what


def prefill(state: Any, tokens: tuple[Tensor, ...]) -> Any:
    return state.prefill(*tokens, **checkers.extras(state, *tokens))


def step(state: Any, tokens: tuple[Tensor, ...]) -> Any:
    """If captured in a graph, the additional inputs of the step are computed from the tokens in each replay."""
    return state.step(*tokens, **checkers.extras(state, *tokens))


# Operations ----------------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records the arguments of every kind of call of our operations, as they were before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES:
            assert not kwargs
            kind = tuple((arg.dim(), arg.dtype) if isinstance(arg, Tensor) else type(arg) for arg in args)
            before = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
            self.seen.setdefault((func, kind), (func, before))
        return func(*args, **(kwargs or {}))


@cache
def calls_of(twin: Pair, device: torch.device) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """(operation, arguments) of each kind of call that a pair's functions and state make."""
    with Calls() as made:
        for function in public_functions(twin.optimized, twin.optimized.__all__).values():
            for given in calls(twin, function, device):
                function(**given)
            if "replicas" in inspect.signature(function).parameters:  # operations of its own on several ranks
                with one_rank(device) as group:
                    for given in calls(twin, function, device):
                        function(**given, process_group=group)
        for options in groupings(twin) if twin.state else ():
            state = new_state(twin, twin.optimized, device, **options)
            prefill(state, prompt(device, seed=1))
            step(state, token(device, seed=2))
            if isinstance(state, BlockState):  # graphs of blocks give `_append` an output
                for count in (1, 2):
                    query, key, value = (tensor[:, :, :count] for tensor in prompt(device, seed=3))
                    valid = torch.ones(len(query), count, dtype=torch.bool, device=device)
                    state._append(query, key, value, valid, torch.empty_like(query.contiguous()))
        if twin.state and "process_group" in inspect.signature(twin.state).parameters:
            with one_rank(device) as group:
                state = new_state(twin, twin.optimized, device, process_group=group)
                for seed in range(2, 4):  # ranks may meet at some steps only
                    step(state, token(device, seed=seed))
    return made.seen


def registered() -> set[str]:
    """The names of all operations, such as kvtwin::longflow_decode."""
    for pair in discovery.pairs():
        assert pair.optimized
    return {name for name in torch._C._dispatch_get_all_op_names() if name.partition("::")[0] in NAMESPACES}


def is_own(twin: Pair, operation: str) -> bool:
    return operation.startswith(f"{twin.name}::" if twin.declared else f"kvtwin::{twin.name}_")


def check(calls: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    """Every check of torch's for the first call of each operation. The other kinds of calls need not be traced again.
    """
    traced = set()
    for operation, given in calls:
        more = {"test_utils": ("test_schema", "test_faketensor")} if operation in traced else {}
        torch.library.opcheck(operation, given, **more)
        traced.add(operation)


WITH_OPERATIONS = [pair for pair in discovery.pairs() if any(is_own(pair, name) for name in registered())]


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("twin", WITH_OPERATIONS, ids=str)
def test_operations_pass_opcheck(twin: Pair, device: torch.device) -> None:
    """Those that have the method's name."""
    own = [call for call in calls_of(twin, device).values() if is_own(twin, call[0].name())]
    assert own, "no operation of the method was called"
    check(own)


@pytest.mark.slow_on_cpu
def test_shared_operations_pass_opcheck(device: torch.device) -> None:
    """Every kind of call once, whichever method makes it. With the test above, no operation goes unchecked."""
    reached, kinds = set(), {}
    for twin in discovery.pairs():
        for kind, call in calls_of(twin, device).items():
            name = call[0].name().removesuffix(".default")
            reached.add(name)
            if not any(is_own(pair, name) for pair in WITH_OPERATIONS):
                kinds.setdefault(kind, call)
    assert reached == registered()
    assert kinds
    check(kinds.values())


# torch.compile -------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """torch.compile to a single graph: only traced on the CPU, and compiled by inductor on a GPU."""
    torch.compiler.reset()
    backend = "eager" if INTERPRETED else "inductor"
    yield lambda function: torch.compile(function, fullgraph=True, backend=backend)
    torch.compiler.reset()


@pytest.mark.slow_on_cpu
@every_pair
@pytest.mark.filterwarnings("ignore")  # warnings of compilers do not concern us
def test_functions_compile(twin: Pair, compiled: Callable[..., Any], device: torch.device) -> None:
    functions = public_functions(twin.optimized, twin.optimized.__all__)
    for name in functions.keys() - set(checkers.ask(twin.name, "ON_THE_HOST", ())):
        function = functions[name]
        for given in calls(twin, function, device):
            actual, expected = compiled(function)(**given), function(**given)
            if INTERPRETED or name == "decode_attention":  # outside of our kernels, inductor fuses and changes rounding
                assert_same_bits(actual, expected, name)


@pytest.mark.slow_on_cpu
@every_state
@pytest.mark.filterwarnings("ignore")
def test_steps_compile(
    twin: Pair, options: dict[str, Any], compiled: Callable[..., Any], device: torch.device
) -> None:
    """Each step replaces a token, and the buffers remain the same tensors."""
    one, other = (new_state(twin, twin.optimized, device, **options) for _ in range(2))
    graph = compiled(one.step)
    for state in (one, other):
        prefill(state, prompt(device, seed=0))
    for number in range(1, 5):
        given = token(device, seed=number)
        more = checkers.extras(one, *given)
        assert_same_bits(graph(*given, **more), other.step(*given, **more), f"output of step {number}")
        assert_same_bits(attributes(one), attributes(other), f"state after step {number}")


# Devices -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: run with --kv-device cuda")
@every_state
def test_a_state_works_on_another_gpu_than_the_current_one(
    twin: Pair, options: dict[str, Any], device: torch.device
) -> None:
    """The state is on the machine's last GPU while the first is current. With a single GPU, both are the same."""
    far = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(0):
        near, away = (new_state(twin, twin.optimized, where, **options) for where in (torch.device("cuda", 0), far))
        for number in range(12):
            run, given = (step, token(near.device, seed=number)) if number else (prefill, prompt(near.device, seed=100))
            output = run(away, tuple(tensor.to(far) for tensor in given))
            assert output.device == far
            assert_same_bits(output.to(near.device), run(near, given), f"output of step {number}")
            for name, tensor in attributes(away).items():
                if isinstance(tensor, Tensor):
                    assert_same_bits(tensor.to(near.device), attributes(near)[name], f"{name} after step {number}")


# CUDA graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: run with --kv-device cuda")
class TestCudaGraphs:
    """A step is captured once and replayed: everything that changes between steps is in the state's tensors."""

    def captured(self, state: Any, static: tuple[Tensor, ...], device: torch.device) -> tuple[Any, Tensor]:
        """A graph of state.step(*static), and its output. The state is empty before and afterwards."""
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles the kernels
                step(state, static)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            output = step(state, static)
        state.reset()
        return graph, output

    @every_state
    def test_replayed_steps_are_the_eager_ones(self, twin: Pair, options: dict[str, Any], device: torch.device) -> None:
        replayed, eager = (new_state(twin, twin.optimized, device, **options) for _ in range(2))
        static = token(device, seed=0)
        graph, output = self.captured(replayed, static, device)
        for round_ in range(2):
            for state in (replayed, eager):
                state.reset()
                prefill(state, prompt(device, seed=100 + round_))
            for number in range(1, 65):
                given = token(device, seed=number)
                for place, tensor in zip(static, given, strict=True):
                    place.copy_(tensor)
                graph.replay()
                assert_same_bits(output, step(eager, given), f"output of step {number}")
                assert_same_bits(attributes(replayed), attributes(eager), f"state after step {number}")

    @every_method
    def test_a_step_without_prompt_can_be_captured(self, twin: Pair, device: torch.device) -> None:
        """This fills an empty cache, whose first slots are free."""
        replayed, eager = (new_state(twin, twin.optimized, device) for _ in range(2))
        static = token(device, seed=0)
        graph, output = self.captured(replayed, static, device)
        for number in range(12):
            graph.replay()
            assert_same_bits(output, step(eager, static), f"output of step {number}")
        assert_same_bits(attributes(replayed), attributes(eager), "state")

    @every_state
    def test_a_prompt_after_a_replay_is_refused(
        self, twin: Pair, options: dict[str, Any], device: torch.device
    ) -> None:
        """The host does not see that the replay gives the reset state a token."""
        state = new_state(twin, twin.optimized, device, **options)
        graph, _ = self.captured(state, token(device, seed=0), device)
        graph.replay()
        with pytest.raises(RuntimeError, match="empty state"):
            prefill(state, prompt(device, seed=100))

    @every_method
    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
    def test_check_finite_is_refused(self, twin: Pair, device: torch.device) -> None:
        """It reads tensors on the host, which a graph cannot replay."""
        state = new_state(twin, twin.optimized, device, check_finite=True)
        if not getattr(state.config, "check_finite", False):
            return
        static = token(device, seed=0)
        step(state, static)
        with pytest.raises(ValueError, match="check_finite"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(state, static)
