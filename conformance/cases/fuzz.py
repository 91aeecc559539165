"""Calls of any public function, config or state with one or two wrong arguments, and what such a call may do.

`tiny` makes the good arguments. Callers pass the wrong ones by mistake: `PLAIN` and `TENSORS` list them. A call may
succeed, because no value is wrong for every parameter.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import discovery, registry
from ..discovery import Pair
from . import tiny

ROOT = Path(__file__).parents[2]
#: Errors for wrong arguments.
REFUSALS = (ValueError, TypeError, NotImplementedError)
#: The most CPU seconds and bytes of a call. Good calls take well under a second and a kilobyte in the interpreter.
SECONDS, BYTES = 20, 2**26

#: Wrong values by name. Those of tensors are made from the good argument, which may be no tensor.
PLAIN: dict[str, Any] = {
    "None": None, "True": True, "text": "text", "empty text": "", "nan": math.nan, "inf": math.inf, "0": 0, "0.5": 0.5,
    "-1": -1, "2**40": 2**40, "2**63 - 1": 2**63 - 1, "-2**63": -(2**63), "10**30": 10**30,
    "10**400": 10**400, "complex": 1j, "list": [], "list of None": [None], "numbers": (1, 2), "dict": {},
    "dtype": torch.int8, "object": object(), "huge numbers": (0, 10**400), "device": "meta", "bytes": b"\xff",
}
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "a list of it": lambda x: x.tolist(),
    "empty": lambda x: x[..., :0],
    "0-d": lambda x: x.flatten()[0].clone(),
    "one more dimension": lambda x: x[None],
    "one dimension less": lambda x: x[0],
    "one row less": lambda x: x[1:],
    "wider": lambda x: torch.cat((x, x), -1),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "int64": lambda x: x.long(),
    "int32": lambda x: x.int(),
    "bool": lambda x: x.bool(),
    "complex": lambda x: x.to(torch.complex64),
    "float8": lambda x: x.to(torch.float8_e5m2),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "transposed in memory": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(2)[::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "requires grad": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x.float().requires_grad_(),
    "all nan": lambda x: torch.full_like(x, math.nan) if x.is_floating_point() else torch.full_like(x, 2**40),
    "all -1": lambda x: torch.full_like(x, -1) if x.dtype != torch.bool else ~x,
    "largest": lambda x: torch.full_like(x, torch.finfo(x.dtype).max if x.is_floating_point() else 1),
}


#: A callable, the state behind it (None for a function), and good arguments.
Made = tuple[Callable[..., Any], Any, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Target:
    """Something to call; `make` creates it."""

    name: str
    make: Callable[[torch.device], Made]

    def __repr__(self) -> str:
        return self.name


def targets(pair: Pair, side: str, device: torch.device) -> list[Target]:
    """The functions of a pair on one side, its config, its state's constructor and methods, and those of its other
    classes (see `parts` in judge/checkers)."""
    module = getattr(pair, side)
    found = []
    for name, function in tiny.public_functions(module, module.__all__).items():
        found.append(Target(name, partial(_function, pair, function)))
        many = range(len(tiny.variants(pair, function, device)))
        found += [Target(f"{name}, variant {number}", partial(_variant, pair, function, number)) for number in many]
    if pair.config is not None and pair.state is not None:
        found.append(Target(pair.config.__name__, partial(_config, pair)))
        found.append(Target(pair.state.__name__, partial(_constructor, pair, module)))
        methods = [name for name in ("prefill", "append_block", "step", "reorder") if hasattr(pair.state, name)]
        found += [Target(f"{pair.state.__name__}.{name}", partial(_method, pair, module, name)) for name in methods]
        if hasattr(pair.state, "next_slot"):
            found.append(Target(f"{pair.state.__name__}.next_slot", partial(_next_slot, pair, module)))
    parts = registry.ask(pair.name, "parts", lambda module: {})(module)
    return found + [Target(name, make) for name, make in parts.items()]


def _function(pair: Pair, function: Callable[..., Any], device: torch.device) -> Made:
    return function, None, tiny.arguments(pair, function, device, optional=True)


def _variant(pair: Pair, function: Callable[..., Any], number: int, device: torch.device) -> Made:
    return function, None, tiny.variants(pair, function, device)[number]


def _config(pair: Pair, device: torch.device) -> Made:
    assert pair.config is not None
    good = registry.small_config(pair, tiny.BUDGET, {})
    return pair.config, None, {field.name: getattr(good, field.name) for field in dataclasses.fields(good)}


def _constructor(pair: Pair, module: Any, device: torch.device) -> Made:
    assert pair.state is not None
    sizes = {
        "batch": tiny.BATCH, "query_heads": tiny.QUERY_HEADS, "key_value_heads": tiny.KEY_VALUE_HEADS,
        "head_dim": tiny.HEAD_DIM, "dtype": torch.float32, "device": device,
    }
    good = {"config": registry.small_config(pair, tiny.BUDGET, {}), **sizes}
    optional = set(inspect.signature(pair.state).parameters) - good.keys()
    return getattr(module, pair.state.__name__), None, good | dict.fromkeys(optional)


def _method(pair: Pair, module: Any, name: str, device: torch.device) -> Made:
    state = tiny.new_state(pair, module, device)
    if name == "reorder":
        return state.reorder, state, {"index": torch.tensor([1, 0], device=device)}
    tokens = tiny.token(device, seed=1) if name == "step" else tiny.prompt(device, seed=1)
    good = dict(zip(("query", "key", "value"), tokens, strict=True)) | registry.extras(state, *tokens)
    if name != "step":
        good["occupied"] = torch.ones(tiny.BATCH, tiny.SLOTS, dtype=torch.bool, device=device)
    return getattr(state, name), state, good


def _next_slot(pair: Pair, module: Any, device: torch.device) -> Made:
    state = tiny.new_state(pair, module, device)
    return partial(setattr, state, "next_slot"), state, {"next_slot": state.next_slot.clone()}


def wrong_value(good: Any, kind: str) -> Any:
    """A wrong value for an argument. A kind of tensor needs a good argument that is a tensor; else it is None."""
    if kind in PLAIN:
        return PLAIN[kind]
    try:
        return TENSORS[kind](good) if isinstance(good, Tensor) else None
    except (RuntimeError, IndexError, NotImplementedError):  # for instance, a 0-d tensor has no row to remove
        return None


class Limits(TorchDispatchMode):
    """Asserts that no operation returns a tensor out of proportion."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                assert tensor.untyped_storage().nbytes() <= BYTES, f"{func} allocated {tensor.nbytes} bytes"
        return result


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise an AssertionError if the block takes more CPU time, where the system has such a timer."""
    def stop(*_: object) -> None:
        raise AssertionError(f"the call takes more than {seconds} s")

    if not hasattr(signal, "ITIMER_VIRTUAL"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def contents(value: Any) -> Any:
    """What must not change: the elements of a tensor, and those in containers and states."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided:
            return value.shape
        # Not contiguous(), which leaves any stride of a dimension with one element.
        plain = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        return value.dtype, tuple(value.shape), plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, (tuple, list)):
        return [contents(one) for one in value]
    if isinstance(value, Mapping):
        return {key: contents(one) for key, one in value.items()}
    if type(value).__module__.startswith("kvtwin.") and hasattr(value, "__dict__"):
        return {name: contents(one) for name, one in vars(value).items() if not callable(one)}
    return repr(value)


def check(target: Target, wrong: Mapping[str, str], device: torch.device) -> str:
    """Call the target with wrong arguments, by name -> kind of value, and assert that it behaves. Returns the error's
    message, or "" if the call was accepted."""
    function, state, good = target.make(device)
    given = good | {name: wrong_value(good[name], kind) for name, kind in wrong.items()}
    before, state_before = contents(given), contents(state)
    call = partial(function, *given.values()) if target.name.endswith(".next_slot") else partial(function, **given)
    caught: Exception | None = None
    try:
        with within(SECONDS), Limits():
            call()
    except (*REFUSALS, RuntimeError) as error:
        caught = error
    if caught is not None:
        assert_clear(caught, names=good)
        assert contents(state) == state_before, "the refused call changed the state"
    assert contents(given) == before, "the call changed its arguments"
    return str(caught or "")


def assert_clear(error: Exception, names: Iterable[str]) -> None:
    """Assert that an error is one of ours and names an argument, or is torch's own about a lack of memory or about meta
    tensors, which have no elements."""
    if isinstance(error, RuntimeError) and any(what in str(error) for what in ("memory", "meta")):
        return
    where = traceback.extract_tb(error.__traceback__)[-1]
    assert isinstance(error, REFUSALS), f"not an error of arguments: {error!r}"
    assert Path(where.filename).is_relative_to(ROOT), f"not our own error: {error!r} in {where}"
    assert any(name in str(error) for name in (*names, "heads")), f"names no argument: {error!r}"


def wrong(target: Target, data: st.DataObject, device: torch.device) -> dict[str, str]:
    """Draw one or two wrong arguments: name -> kind of value."""
    names = names_of(target, device)
    chosen = data.draw(st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=2, unique=True))
    kinds = {name: sorted(PLAIN) + (sorted(TENSORS) if names[name] else []) for name in chosen}
    return {name: data.draw(st.sampled_from(kinds[name]), label=name) for name in chosen}


def names_of(target: Target, device: torch.device) -> dict[str, bool]:
    """The arguments of a target, and whether the good one is a tensor."""
    return {name: isinstance(value, Tensor) for name, value in target.make(device)[2].items()}


def pairs() -> list[tuple[Pair, str]]:
    return [(pair, side) for pair in discovery.pairs() for side in ("reference", "optimized")]
