"""An error in the middle of a state's method, such as an out-of-memory error, at every torch call and kernel launch.

Afterwards the state is as it was, so that a retry gives the same results, or it refuses everything until `reset()`.
These tests check our own states for any --kv-impl (see test_twins.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import tiny
from kvtwin.conformance.cases.paged_cases import FORMATS, config_of
from kvtwin.conformance.discovery import Pair
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.compare import assert_same

pytestmark = pytest.mark.whole

#: True with the profile thorough: errors at every place of every call, and more configs.
THOROUGH = settings().max_examples >= 1000
#: Allocations and copies inside custom operations, where a TorchFunctionMode sees nothing.
INSIDE = (
    *((torch, name) for name in ("arange", "cat", "empty", "empty_like", "full", "ones", "stack", "zeros")),
    (torch, "zeros_like"),
    *((Tensor, name) for name in ("clone", "contiguous", "copy_", "new_empty", "new_full", "new_zeros")),
)
#: Places of each call where an error comes otherwise: the first, the last, and one between.
PLACES = 3
OPTIONS = {"epikv": ({"policy": "attn_x_hs"}, {"policy": "lag_kv"}), "synckv": ({"offload": True},)}


class Interruption(Exception):
    """In place of an out-of-memory error."""


class Interrupter(TorchFunctionMode):
    """Counts torch calls and kernel launches, and raises at number `at`."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.count, self.at = 0, at

    def reached(self) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            raise Interruption

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") != "__get__":  # an attribute of a tensor
            self.reached()
        return function(*args, **(kwargs or {}))


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, device: torch.device, at: int | None = None) -> Iterator[Interrupter]:
    """Raise at the `at`-th torch call or launch inside the ``with`` block; None: count them."""
    if device.type == "cuda":
        from triton.runtime.jit import JITFunction as Launcher

        name = "run"
    else:
        from triton.runtime.interpreter import GridExecutor as Launcher

        name = "__call__"
    mode = Interrupter(at)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch._C._is_torch_function_mode_enabled():  # else the mode counts it
                mode.reached()
            return function(*args, **kwargs)
        return call

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode.reached()
        return launch(self, *args, **kwargs)

    launch = getattr(Launcher, name)
    with monkeypatch.context() as patch:
        for owner, inside in INSIDE:
            patch.setattr(owner, inside, counted(getattr(owner, inside)))
        patch.setattr(Launcher, name, launched)
        with mode:
            yield mode


Call = Callable[[Any], Tensor | None]


def given(method: str, seed: int, device: torch.device) -> Call:
    """A call of `prefill`, `append_block` or `step` with tokens of this seed."""
    tokens = tiny.token(device, seed=seed) if method == "step" else tiny.prompt(device, seed=seed)

    def call(state: Any) -> Tensor:
        more = checkers.extras(state, *tokens)
        result: Tensor = getattr(state, method)(*tokens, **more)
        return result

    return call


def calls(state: Any, device: torch.device) -> list[tuple[str, Call]]:
    """What is done with a state, in this order."""
    index = torch.arange(tiny.BATCH - 1, -1, -1, device=device)
    found = [("prefill", given("prefill", 1, device)), *(("step", given("step", seed, device)) for seed in (2, 3, 4))]
    if hasattr(state, "append_block"):
        found.append(("append_block", given("append_block", 5, device)))
    found += [("reorder", lambda state: state.reorder(index)), ("step", given("step", 6, device)),
              ("reset", lambda state: state.reset())]
    return found


def places(count: int) -> list[int]:
    """Some of the numbers below `count`, the first and the last among them."""
    if THOROUGH or count <= PLACES:
        return list(range(count))
    return sorted({round(number * (count - 1) / (PLACES - 1)) for number in range(PLACES)})


def cases() -> list[Any]:
    found = tiny.states() if THOROUGH else [(pair, {}) for pair in discovery.with_state()]
    if THOROUGH:
        found += [(pair, options) for pair in discovery.with_state() for options in OPTIONS.get(pair.name, ())]
    return [
        pytest.param(pair, options, side, id=f"{side}-{pair.name}" + "".join(f"-{k}={v}" for k, v in options.items()))
        for pair, options in found for side in ("reference", "optimized")
        if side == "optimized" or "offload" not in options
    ]


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(("pair", "options", "side"), cases())
def test_an_interrupted_call_is_undone_or_noticed(
    pair: Pair, options: dict[str, Any], side: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new() -> Any:
        return tiny.new_state(pair, getattr(pair, side), device, **options)

    tried, refused = interrupt_all(new, calls(new(), device), device, monkeypatch, copies="offload" not in options)
    print(f"{pair.name} {side} {options}: {tried} interruptions, {refused} noticed, {tried - refused} undone")


@pytest.mark.slow_on_cpu
def test_every_error_in_a_step_of_a_block_state_is_undone_or_noticed(
    twins: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at each place of a step. Block states share `step`. KeyDiff evicts in a kernel of its own after the
    shared ones, so an error between them leaves one token too many, and the next step gives another result."""
    pair = next(one for one in discovery.with_state() if one.name == "keydiff")
    tried, _ = interrupt_all(
        lambda: tiny.new_state(pair, twins.optimized.keydiff, device),
        [("prefill", given("prefill", 1, device)), *(("step", given("step", seed, device)) for seed in (2, 3))],
        device, monkeypatch, among=range,
    )
    assert tried


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_an_interrupted_paged_cache_is_undone_or_refuses(
    side: str, twins: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ThinKV's cache, used without the state."""
    module = getattr(twins, side).thinkv
    query, key, value = tiny.token(device, seed=1)

    def rows(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=device)

    def append(position: int) -> Call:
        return lambda cache: cache.append((1 + position) * key, value - position, rows(position, position))

    def decode(cache: Any) -> Tensor:
        output: Tensor = module.decode_attention(query, cache).output
        return output

    changes: list[tuple[str, Call]] = [
        ("append", append(0)), ("append", append(1)),
        ("flush", lambda cache: cache.flush(rows(True, True), rows(0, 2), rows(0, 0))), ("append", append(2)),
        ("evict", lambda cache: cache.evict(cache.positions == 0)),
        ("reorder", lambda cache: cache.reorder(rows(1, 0))),
        ("release", lambda cache: cache.release(rows(True, False))), ("append", append(3)),
        ("reset", lambda cache: cache.reset()),
    ]
    todo = [one for change in changes for one in (change, ("decode", decode))]
    interrupt_all(
        lambda: module.PagedCache(
            config_of(FORMATS[0], tokens=8), batch=tiny.BATCH, key_value_heads=tiny.KEY_VALUE_HEADS,
            head_dim=tiny.HEAD_DIM, dtype=torch.float32, device=device,
        ),
        todo, device, monkeypatch,
    )


def interrupt_all(
    new: Callable[[], Any], todo: list[tuple[str, Call]], device: torch.device, monkeypatch: pytest.MonkeyPatch, *,
    copies: bool = True, among: Callable[[int], Iterable[int]] = places,
) -> tuple[int, int]:
    """Interrupt each call at some places, and then retry it. Returns the numbers of interruptions and of refusals.

    among: which of a number of places. copies: False for states that cannot be copied, such as one with a bank in host
    memory.
    """
    def state_after(number: int) -> Any:
        if copies:
            return copy.deepcopy(before[number])
        made = new()
        for _, call in todo[:number]:
            call(made)
        return made

    state, before, right = new(), [], []
    for _, call in todo:
        before.append(copy.deepcopy(state) if copies else None)
        right.append(call(state))
    tried = refused = 0
    for number, (name, call) in enumerate(todo):
        if name == todo[number - 1][0] and not THOROUGH:
            continue  # steps in a row
        state = state_after(number)
        with interrupted(monkeypatch, device) as counted:
            call(state)
        for place in among(counted.count):
            state = state_after(number)
            with interrupted(monkeypatch, device, place), pytest.raises(Interruption):
                call(state)
            tried += 1
            try:
                retried = call(state)
            except Exception as error:
                if not isinstance(error, RuntimeError) or "call reset()" not in str(error):
                    pytest.fail(f"{name} again, interrupted at place {place}: {error!r}")
                refused += 1
                assert_refuses_everything(state, todo)
                state.reset()
                follow(state, todo[:2], right[:2], f"after {name} was interrupted at place {place}, and reset()")
                continue
            where = f"{name} again, interrupted at place {place} of {counted.count}"
            if name == "reset":
                follow(state, todo[:2], right[:2], where)
            else:
                same(retried, right[number], where)
                follow(state, todo[number + 1:number + 2], right[number + 1:number + 2], where)
    return tried, refused


def assert_refuses_everything(state: Any, todo: list[tuple[str, Call]]) -> None:
    for name, call in todo:
        if name != "reset":
            with pytest.raises(RuntimeError, match=r"call reset\(\)"):
                call(state)


def follow(state: Any, todo: list[tuple[str, Call]], right: list[Tensor | None], where: str) -> None:
    """The calls give the right results."""
    for (name, call), expected in zip(todo, right, strict=True):
        same(call(state), expected, f"{name} {where}")


def same(actual: Tensor | None, expected: Tensor | None, where: str) -> None:
    if expected is not None:
        assert actual is not None
        assert_same(actual, expected, what=where)
