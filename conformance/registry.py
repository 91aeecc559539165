"""What the checker of a method declares: see judge/checkers. Found by name, so that cases need not import the judge."""

from __future__ import annotations

import importlib
import importlib.util
from functools import reduce
from types import ModuleType
from typing import Any

from . import discovery
from .own_methods import Method

PACKAGE = "kvtwin.conformance.judge.checkers"


def checker_of(name: str) -> ModuleType | None:
    """The checker of a pair, None if it has none."""
    method = _method(name)
    if method is not None:
        return importlib.import_module(method.checker)
    qualified = f"{PACKAGE}.{name}"
    return importlib.import_module(qualified) if importlib.util.find_spec(qualified) else None


def ask(name: str, attribute: str, default: Any) -> Any:
    """An attribute of a pair's checker, or the default."""
    method = _method(name)
    if method is not None and attribute == "configs":
        module, _, function = method.configs.partition(":")
        return getattr(importlib.import_module(module), function)
    return getattr(checker_of(name), attribute, default)


def _method(name: str) -> Method | None:
    """The declaration of a method of another package."""
    return next((one.declared.method for one in discovery.pairs() if one.name == name and one.declared), None)


def required(name: str) -> dict[str, Any]:
    """Options of a method's config that have no default: see REQUIRED."""
    return dict(ask(name, "REQUIRED", {}))


def measured(name: str, budget: int) -> dict[str, Any]:
    """Options of a method's config with which it is measured: see the package."""
    config = next((one.config for one in discovery.methods() if one.name == name), None)
    ours: dict[str, Any] = getattr(config, "defaults_for", lambda budget, given: {})(budget, {})
    return {**required(name), **ours, **ask(name, "measured", lambda budget: {})(budget)}


def extras(state: Any, query: Any, key: Any, value: Any) -> dict[str, Any]:
    """Further keyword arguments of a state's `prefill` and `step` for these tokens: see the module."""
    name = _name_of(state)
    made: dict[str, Any] = ask(name, "extras", lambda *_: {})(state, query, key, value) if name else {}
    return made


def lossy(state: Any) -> bool:
    """Whether the state's method is LOSSY."""
    name = _name_of(state)
    return name is not None and bool(ask(name, "LOSSY", False))


def held_bytes(state: Any) -> int:
    """The memory of the tokens of a state whose method has `bytes_of`."""
    name = _name_of(state)
    assert name is not None
    return int(ask(name, "bytes_of", None)(state))


def _name_of(state: Any) -> str | None:
    """The name of the state's method, None if its config is of no method."""
    config = getattr(state, "config", None)
    for found in discovery.methods():
        if found.config is not None and isinstance(config, found.config):
            return found.name
    return None


def small_config(found: discovery.Pair, budget: int, options: dict[str, Any]) -> Any:
    """A method's config with a small budget (see SMALL)."""
    assert found.config is not None
    return found.config(**{**with_budget(found.name, budget), **small(found.name, budget), **options})


def with_budget(name: str, budget: int) -> dict[str, Any]:
    """The option of a method's config that is its budget, with this value; nothing if it has none (see BUDGET)."""
    option = ask(name, "BUDGET", "budget")
    return {} if option is None else {option: budget}


def small(name: str, budget: int) -> dict[str, Any]:
    """Options of a method's config for a small budget: see SMALL."""
    return {**ask(name, "SMALL", {}), **ask(name, "small", lambda budget: {})(budget)}


def every() -> dict[str, ModuleType]:
    """All checkers, by the names of their pairs."""
    found = {pair.name: checker_of(pair.name) for pair in discovery.pairs()}
    return {name: judge for name, judge in found.items() if judge is not None}


def module(side: Any, found: discovery.Pair) -> Any:
    """The module of a pair in `twins.reference` or `twins.optimized`."""
    return reduce(getattr, found.path.split("."), side)


def state_name(name: str) -> str:
    """The name of a method's state."""
    state = pair(name).state
    assert state is not None
    return state.__name__


def pair(name: str) -> discovery.Pair:
    """The pair of this name. Raises LookupError."""
    for found in discovery.pairs():
        if found.name == name:
            return found
    raise LookupError(f"no method or pair is called {name!r}; there are {', '.join(map(str, discovery.pairs()))}")
