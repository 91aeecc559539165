"""The two sides of a run: ``twins.reference`` and ``twins.optimized``, the implementation under test.

With ``--kv-impl my_package`` the second is a facade over that package. It finds methods by our names
(``my_package.longflow``; ``my_package.baselines.snapkv`` or ``my_package.snapkv``; submodules or attributes), converts
return values to our result types, and raises NotProvided for a missing name: pytest reports the test as skipped, and
the summary and the report as *not provided*.

A function may raise NotImplementedError for an argument that it does not support. A Hypothesis test skips that example,
and the summary counts the skipped ones. Any other test, or a test without a remaining example, is *not provided*.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import pytest

from .. import discovery
from ..judge import stats

NOT_PROVIDED = "not provided: "
MISSING: Any = object()
_Skipped: Any = pytest.skip.Exception  # the class is public, its type is not


class NotProvided(_Skipped):
    """Raised if a test uses something that the implementation under test does not have."""

    def __init__(self, what: str) -> None:
        super().__init__(NOT_PROVIDED + what)


class Twins:
    """The ``twins`` fixture. Methods are attributes: ``twins.optimized.longflow.decode_attention``."""

    def __init__(self, implementation: str | None = None) -> None:
        """``implementation`` is the module to test, None for kvtwin.optimized. Raises pytest.UsageError."""
        self.reference = Side(discovery.REFERENCE)
        self.optimized: Side | Facade
        if implementation is None:
            self.optimized = Side(discovery.OPTIMIZED)
        else:
            self.optimized = Facade(implementation, _import(implementation))

    def __repr__(self) -> str:
        return f"<twins: {self.reference!r}, {self.optimized!r}>"


class Side:
    """One of our own packages. Modules are imported at first access."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        qualified = f"{self._package}.{name}"
        if any(qualified == f"{self._package}.{folder}" for folder in discovery.FOLDERS):
            return Side(qualified)
        # Hypothesis looks up attributes on every argument and expects an AttributeError.
        if importlib.util.find_spec(qualified) is None:
            raise AttributeError(f"{self._package} has no module {name!r}")
        return importlib.import_module(qualified)

    def __repr__(self) -> str:
        return self._package


class Facade:
    """A third-party package, or its ``baselines``, with the interface of ours."""

    def __init__(self, name: str, *places: Any, folder: str = "") -> None:
        """``places`` are searched in order; ``folder`` is "" or "baselines"."""
        self._name, self._places, self._folder = name, places, folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in discovery.FOLDERS:
            inner = _member(self._places[0], name)
            places = self._places if inner is MISSING else (inner, *self._places)
            return Facade(self._name, *places, folder=name)
        pair = self._pair(name)
        for place in self._places:
            found = _member(place, name)
            if found is not MISSING:
                return Method(f"{self._name}.{pair.path}", found, pair)
        raise NotProvided(f"{self._name}.{pair.path}")

    def _pair(self, name: str) -> discovery.Pair:
        path = f"{self._folder}.{name}" if self._folder else name
        for pair in discovery.pairs():
            if pair.path == path:
                return pair
        raise AttributeError(f"kvtwin has no method {path!r}")

    def __repr__(self) -> str:
        return self._name


class Method:
    """A third-party module for one method. Configs and result types are always kvtwin's."""

    def __init__(self, name: str, module: Any, pair: discovery.Pair) -> None:
        self._name, self._module, self._pair = name, module, pair

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith(("Config", "Result")):
            return getattr(self._pair.reference, name)
        if name not in self._pair.exports:
            raise AttributeError(f"kvtwin's {self._pair.path} has no {name!r}")
        found = getattr(self._module, name, MISSING)
        if found is MISSING or found is None:
            raise NotProvided(f"{self._name}.{name}")
        stats.touched()
        result = _result_type(self._pair.reference, name)
        if isinstance(found, type) or not callable(found):
            return found
        return _judgeable(found, result, f"{self._name}.{name}")

    def __repr__(self) -> str:
        return self._name


def normalise(value: Any, result: type[tuple[Any, ...]], name: str) -> Any:
    """Convert ``value`` to the NamedTuple ``result``: its fields by attribute, by key, or in order.

    Raises TypeError, which fails the test, if a field is missing.
    """
    fields: Sequence[str] = result._fields  # type: ignore[attr-defined]
    if isinstance(value, result):
        return value
    if isinstance(value, Mapping) and all(field in value for field in fields):
        return result(*(value[field] for field in fields))
    if all(hasattr(value, field) for field in fields):
        return result(*(getattr(value, field) for field in fields))
    if isinstance(value, (tuple, list)) and len(value) == len(fields):
        return result(*value)
    shape = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    raise TypeError(
        f"{name} returned a {type(value).__name__}{shape}; expected an object, or a mapping, with "
        f"{', '.join(fields)}, or a tuple of these {len(fields)} in this order"
    )


def _judgeable(function: Callable[..., Any], result: type[tuple[Any, ...]] | None, name: str) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = function(*args, **kwargs)
        except NotImplementedError as error:
            _refused(f"{name}: {error}")
        stats.answered()
        return returned if result is None else normalise(returned, result, name)

    return call


def _refused(what: str) -> NoReturn:
    import hypothesis  # optional: this module is also imported without it

    stats.refused(what)
    if hypothesis.currently_in_test_context():
        hypothesis.reject()
    raise NotProvided(what)


def _result_type(module: ModuleType, name: str) -> type[tuple[Any, ...]] | None:
    """The NamedTuple that our function of this name returns; None for classes and functions that return a tensor."""
    function = getattr(module, name, None)
    if function is None or isinstance(function, type):
        return None
    returned = getattr(function, "__annotations__", {}).get("return")
    if isinstance(returned, str):
        returned = getattr(module, returned, None)
    return returned if isinstance(returned, type) and hasattr(returned, "_fields") else None


def _member(place: Any, name: str) -> Any:
    """An attribute or, for a package, a submodule; MISSING if it has neither."""
    found = getattr(place, name, MISSING)
    if found is not MISSING or not isinstance(place, ModuleType) or not hasattr(place, "__path__"):
        return found
    qualified = f"{place.__name__}.{name}"
    # Check that it exists first: an import error inside an existing module must be raised, not treated as missing.
    return MISSING if importlib.util.find_spec(qualified) is None else _imported(qualified)


def _imported(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # our tests turn warnings into errors; imports may raise deprecation warnings
        return importlib.import_module(name)


def _import(name: str) -> ModuleType:
    try:
        return _imported(name)
    except ImportError as error:
        raise pytest.UsageError(
            f"--kv-impl {name}: cannot import it: {error} (a module of this folder needs 'python -m pytest')"
        ) from error
