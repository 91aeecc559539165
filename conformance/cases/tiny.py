"""Calls of any pair on tiny tensors, for tests that do not check the numbers.

Arguments are made by parameter name, since a name means the same in every function. States are used through the
interface that all states share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import discovery, registry
from ..discovery import Pair
from .paged_states import empty_pages, filled_pages
from .paged_view import PagedLayout

BATCH, QUERY_HEADS, KEY_VALUE_HEADS, SLOTS, HEAD_DIM, WINDOW, BUDGET = 2, 4, 2, 6, 16, 2, 4
HEADS = (QUERY_HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)  # of query, key and value
#: Sizes within `larger`: more slots than a tile has, and, unless it is given, a head_dim that is no power of two.
LARGER = {"SLOTS": 120, "HEAD_DIM": 48, "WINDOW": 9, "BUDGET": 100} if torch.cuda.is_available() else {
    "SLOTS": 20, "HEAD_DIM": 48, "WINDOW": 3, "BUDGET": 18
}


@contextmanager
def larger(head_dim: int = LARGER["HEAD_DIM"], group: int = QUERY_HEADS // KEY_VALUE_HEADS) -> Iterator[None]:
    """In this context, LARGER replaces the sizes above. group: query heads per KV head."""
    heads = {"QUERY_HEADS": KEY_VALUE_HEADS * group, "HEADS": (KEY_VALUE_HEADS * group, *HEADS[1:])}
    with mock.patch.dict(globals(), {**LARGER, **heads, "HEAD_DIM": head_dim}):
        yield


def groupings(pair: Pair) -> list[dict[str, Any]]:
    """Options to test: none, and the checker's GROUPINGS, which change a state's shapes."""
    return [{}, *registry.ask(pair.name, "GROUPINGS", ())]


def states() -> list[tuple[Pair, dict[str, Any]]]:
    """Every method that has a state, with each of its groupings."""
    return [(pair, options) for pair in discovery.with_state() for options in groupings(pair)]


def public_functions(owner: Any, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Those of `names` that are functions of the module or class `owner`."""
    return {name: member for name in names if inspect.isfunction(member := inspect.getattr_static(owner, name))}


def _random(seed: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def prompt(device: torch.device, *, seed: int, head_dim: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, T, D], key and value [B, Hkv, T, D]; longer than the budget of `new_state`. Default D: HEAD_DIM."""
    sizes = SLOTS, head_dim or HEAD_DIM
    query, key, value = (
        _random(3 * seed + number, device, BATCH, heads, *sizes) for number, heads in enumerate(HEADS)
    )
    return query, key, value


def token(device: torch.device, *, seed: int, head_dim: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, D], key and value [B, Hkv, D]."""
    query, key, value = (tensor[:, :, 0].contiguous() for tensor in prompt(device, seed=seed, head_dim=head_dim))
    return query, key, value


def arguments(pair: Pair, function: Callable[..., Any], device: torch.device, *, optional: bool) -> dict[str, Any]:
    """The required arguments of a function of `pair`, and with `optional` also the optional ones that are known here or
    to the pair's checker."""
    query, key, value = prompt(device, seed=0)
    occupied = torch.ones(BATCH, SLOTS, dtype=torch.bool, device=device)
    occupied[0, :2] = False
    protected = torch.zeros_like(occupied)
    protected[:, 3] = True
    known = {
        "query": query[:, :, 0], "query_window": query[:, :, :WINDOW], "key": key, "value": value,
        "occupied": occupied, "protected": protected, "budget": BUDGET - 1, "scale": 0.5,
        "pages": filled_pages(PagedLayout(4), key, value),
        **registry.ask(pair.name, "arguments", lambda device: {})(device),
    }
    prefix = f"{function.__name__}."
    known |= {name.removeprefix(prefix): value for name, value in known.items() if name.startswith(prefix)}
    parameters = inspect.signature(function).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    if required - known.keys():
        unknown = ", ".join(sorted(required - known.keys()))
        raise LookupError(f"{function.__name__} requires {unknown}: see arguments() in judge/checkers/{pair.name}.py")
    return {name: known[name] for name in parameters if name in required or (optional and name in known)}


def calls(
    pair: Pair, function: Callable[..., Any], device: torch.device, optional: Iterable[bool] = (False, True)
) -> Iterator[dict[str, Any]]:
    """Arguments of calls of a function of `pair`: `arguments` without and with the optional ones, and the `variants` of
    the pair's checker."""
    for more in optional:
        yield arguments(pair, function, device, optional=more)
    yield from variants(pair, function, device)


def variants(pair: Pair, function: Callable[..., Any], device: torch.device) -> list[dict[str, Any]]:
    """Arguments of further calls: see the checkers."""
    made = registry.ask(pair.name, "variants", lambda name, given: [])
    return list(made(function.__name__, arguments(pair, function, device, optional=True)))


def new_state(
    pair: Pair, side: Any, device: torch.device, *, dtype: torch.dtype = torch.float32,
    head_dim: int | None = None, process_group: Any = None, layout: PagedLayout | None = None, **options: Any,
) -> Any:
    """The state of `pair` in its module `side`, with those of `options` that the config has. Default D: HEAD_DIM.

    layout: its tokens are in pages. With sink_logits, it has attention sinks.
    """
    assert pair.config is not None
    assert pair.state is not None
    more = {} if process_group is None else {"process_group": process_group}
    if "sink_logits" in options:
        more["sink_logits"] = torch.zeros(QUERY_HEADS, device=device)
    if layout is not None:
        more["pages"] = empty_pages(
            layout, batch=BATCH, slots=BUDGET, key_value_heads=KEY_VALUE_HEADS, head_dim=head_dim or HEAD_DIM,
            dtype=dtype, device=device,
        )
    fields = {name: value for name, value in options.items() if name in inspect.signature(pair.config).parameters}
    return getattr(side, pair.state.__name__)(
        registry.small_config(pair, BUDGET, fields), batch=BATCH, query_heads=QUERY_HEADS,
        key_value_heads=KEY_VALUE_HEADS, head_dim=head_dim or HEAD_DIM, dtype=dtype, device=device, **more,
    )


def attributes(state: Any) -> dict[str, Any]:
    """Copies of all public attributes except methods, with zeros in unoccupied slots, whose contents are unspecified.

    Omits keys and values that are computed from compressed data: they are slow in the interpreter, and outputs depend
    on them.
    """
    computed = {"key", "value"} if registry.lossy(state) else set()
    names = sorted(name for name in {*dir(state)} - computed if not name.startswith("_"))
    found = {name: getattr(state, name) for name in names if hasattr(state, name)}  # another's may lack some
    values = {name: value for name, value in found.items() if not inspect.ismethod(value) and not is_part(value)}
    hidden = ~state.occupied if state.occupied.dim() == 3 else ~state.occupied[:, None]
    for name in {"key", "value"} & values.keys():
        values[name] = values[name].masked_fill(hidden[..., None], 0)
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def is_part(value: Any) -> bool:
    """Whether `value` is one of our objects that hold tensors, not a plain value or a config."""
    return discovery.is_ours(type(value)) and not is_dataclass(value) and not isinstance(value, tuple)


def description(value: Any) -> Any:
    """The dtype, shape and device of a tensor; any other value unchanged."""
    return (value.dtype, tuple(value.shape), value.device) if isinstance(value, Tensor) else value
