"""Calls of every function and state of a pair's optimized side on tiny tensors. Together they launch every kernel.

lab/compile_only.py compiles what these calls launch, lab/sanitize.py has compute-sanitizer watch them, and
test_repeatable.py repeats them under disturbance.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...reference.contract import Pages
from ...reference.contract.scales import FP8
from .. import registry
from ..discovery import Pair
from . import tiny
from .paged_view import PagedLayout

STEPS = 3
#: Page sizes of states over pages: smaller than a tile, and not.
PAGES = (16, 64)


@dataclass(frozen=True)
class Call:
    """``run()`` makes the call and returns its result. Each call creates a new state."""

    name: str
    run: Callable[[], Any]

    def __str__(self) -> str:
        return self.name


def calls_of(
    pair: Pair, device: torch.device, dtype: torch.dtype, head_dims: Sequence[int],
    optional: Sequence[bool] = (False, True),
) -> Iterator[Call]:
    """Calls of every function of a pair, without and with optional arguments, and of its state with each head_dim."""
    functions = tiny.public_functions(pair.optimized, pair.optimized.__all__)
    for name in sorted(functions.keys() - set(registry.ask(pair.name, "ON_THE_HOST", ()))):
        for given in tiny.calls(pair, functions[name], device, optional):
            holder = next((value for value in given.values() if hasattr(value, "dequantized")), None)
            to = getattr(holder, "dtype", dtype)  # a cache accepts its own dtype only
            given = {key: value if key.endswith("_scale") else _cast(value, to) for key, value in given.items()}
            yield Call(f"{name}({', '.join(given)})", partial(functions[name], **given))
    for size in PAGES if pair.state and "pages" in inspect.signature(pair.state).parameters else ():
        assert pair.state is not None
        made = partial(decode, pair, device, dtype, max(head_dims), {"layout": PagedLayout(size)})
        yield Call(f"{pair.state.__name__}(pages of {size})", made)
    states = [
        ({**options, **more}, head_dim) for options in tiny.groupings(pair)
        for head_dim in head_dims for more in ({}, *registry.ask(pair.name, "COMPILED", ()))
    ]
    for options, head_dim in states if pair.state else ():
        assert pair.state is not None
        named = ", ".join(f"{name}={value}" for name, value in {**options, "head_dim": head_dim}.items())
        yield Call(f"{pair.state.__name__}({named})", partial(decode, pair, device, dtype, head_dim, options))


def decode(
    pair: Pair, device: torch.device, dtype: torch.dtype, head_dim: int, options: dict[str, Any]
) -> tuple[list[Tensor], Any]:
    """The outputs of a new state for a prompt and for STEPS tokens, and the state."""
    state = tiny.new_state(pair, pair.optimized, device, **options, dtype=dtype, head_dim=head_dim)
    calls = [(state.prefill, tiny.prompt(device, seed=1, head_dim=head_dim))]
    calls += [(state.step, tiny.token(device, seed=1 + step, head_dim=head_dim)) for step in range(STEPS)]
    outputs = []
    for method, given in calls:
        tokens = [_cast(tensor, dtype) for tensor in given]
        outputs.append(method(*tokens, **registry.extras(state, *tokens)))
    return outputs, state


def tensors(result: Any) -> Iterator[Tensor]:
    """All tensors in what a call returns. Of a state, those of its public attributes, with zeros in free slots."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for value in result:
            yield from tensors(value)
    elif isinstance(result, dict):
        yield from tensors(list(result.values()))
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        yield from tensors([getattr(result, field.name) for field in dataclasses.fields(result)])
    elif hasattr(result, "prefill"):
        yield from tensors(tiny.attributes(result))


def _cast(value: Any, to: torch.dtype) -> Any:
    if isinstance(value, Pages):
        return Pages(*(_cast(tensor, to) for tensor in value))
    floating = isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in FP8
    return value.to(to) if floating else value
