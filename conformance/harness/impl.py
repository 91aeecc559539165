"""The two sides of a run: ``twins.reference`` and ``twins.optimized``, the implementation under test.

With ``--kv-impl my_package`` the second is a facade over that package. It finds methods by our names
(``my_package.longflow``; ``my_package.baselines.snapkv`` or ``my_package.snapkv``; submodules or attributes), converts
return values to our result types, and raises NotProvided for a missing name: pytest reports the test as skipped, and
the summary and the report as *not provided*.

The module's `CAPABILITIES` (see `Capabilities`) say what it supports. A call outside of them is not made. A function,
or a class's constructor or method, may also raise NotImplementedError. Both count as refusals: a Hypothesis test skips
the example, and any other test, or a test without a remaining example, is *not provided*. What Triton's interpreter
cannot run counts as a refusal too, of the *environment*.

A result may lack fields: each of the others is judged, and a test that uses a missing one is *not provided*.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import pytest

from .. import capabilities, discovery, stats
from ..capabilities import Capabilities
from ..judge.lacking import absent, is_read_by_the_suite
from ..refusals import ENVIRONMENT, EnvironmentLimit, NotProvided
from . import naming, survival, wording
from .fair_play import Guard
from .manners import note_effects
from .returned import as_tensor, check_attributes, normalise

MISSING: Any = object()
#: What the messages of Triton's interpreter say of operations that it lacks.
LACKING = ("Unsupported data type", "not supported in interpreter mode", "is not implemented in interpreter")


def environment_limit(error: BaseException) -> str | None:
    """What Triton's interpreter cannot do, if that is the cause of an error; None if it is not.

    The interpreter raises InterpreterError for an operation that it lacks, and for numpy's warnings about numbers that
    a GPU handles without one, if warnings are errors. A group of errors has such a cause if all of them have.
    """
    inside = getattr(error, "exceptions", ())
    if inside:
        limits = [environment_limit(one) for one in inside]
        return None if None in limits else "; ".join(dict.fromkeys(map(str, limits)))
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    if not any(
        type(one).__name__ == "InterpreterError" and type(one).__module__.startswith("triton.") for one in chain
    ):
        return None
    for one in chain:
        if isinstance(one, Warning) or any(text in str(one) for text in LACKING):
            return f"Triton's interpreter: {one}"
    return None


class Twins:
    """The ``twins`` fixture. Methods are attributes: ``twins.optimized.longflow.decode_attention``."""

    def __init__(self, implementation: str | None = None) -> None:
        """``implementation`` is the module to test, None for kvtwin.optimized. Raises pytest.UsageError."""
        self.reference = Side(discovery.REFERENCE)
        self.optimized: Side | Facade
        if implementation is None:
            self.optimized = Side(discovery.OPTIMIZED)
        else:
            guard = Guard(implementation)
            self.optimized = Facade(implementation, _import(implementation, guard), guard=guard)

    def capabilities(self, method: str | None) -> Capabilities:
        """What the implementation under test declares for a method."""
        if method is None or not isinstance(self.optimized, Facade):
            return Capabilities()
        return self.optimized.capabilities(method)

    def __repr__(self) -> str:
        return f"<twins: {self.reference!r}, {self.optimized!r}>"


class Side:
    """One of our own packages, with the methods of other packages. Modules are imported at first access."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        qualified = f"{self._package}.{name}"
        if any(qualified == f"{self._package}.{folder}" for folder in discovery.FOLDERS):
            return Side(qualified)
        if importlib.util.find_spec(qualified) is not None:
            return importlib.import_module(qualified)
        for pair in discovery.methods():
            if pair.declared is not None and pair.name == name:
                return pair.reference if self._package == discovery.REFERENCE else pair.optimized
        # Hypothesis looks up attributes on every argument and expects an AttributeError.
        raise AttributeError(f"{self._package} has no module {name!r}")

    def __repr__(self) -> str:
        return self._package


class Facade:
    """A third-party package, or its ``baselines``, with the interface of ours."""

    def __init__(self, name: str, *places: Any, folder: str = "", guard: Guard | None = None) -> None:
        """``places`` are searched in order; ``folder`` is "" or "baselines"."""
        self._name, self._places, self._folder, self.guard = name, places, folder, guard or Guard(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in discovery.FOLDERS:
            inner = self._member(self._places[0], name)
            places = self._places if inner is MISSING else (inner, *self._places)
            return Facade(self._name, *places, folder=name, guard=self.guard)
        pair = self._pair(name)
        found = self._method(name)
        if found is MISSING:
            raise NotProvided(f"{self._name}.{pair.path}")
        return Method(f"{self._name}.{pair.path}", found, pair, self._declared(found, *self._places), self.guard)

    def _method(self, name: str) -> Any:
        """Their module for a method; MISSING if there is none."""
        found = (self._member(place, name) for place in self._places)
        return next((one for one in found if one is not MISSING), MISSING)

    def _member(self, place: Any, name: str) -> Any:
        """An attribute or, for a package, a submodule; MISSING if it has neither."""
        found = getattr(place, name, MISSING)
        if found is not MISSING or not isinstance(place, ModuleType) or not hasattr(place, "__path__"):
            return found
        qualified = f"{place.__name__}.{name}"
        # Check that it exists first: an import error inside an existing module must be raised, not treated as missing.
        return MISSING if importlib.util.find_spec(qualified) is None else _imported(qualified, self.guard)

    def capabilities(self, method: str) -> Capabilities:
        """What the implementation declares for the method: in its module, else in the package.

        Raises TypeError if the declaration is not a `Capabilities`.
        """
        found = self.module(method)
        return self._declared(*(() if found is MISSING else (found,)), *self._all_places())

    def _declared(self, *places: Any) -> Capabilities:
        found = capabilities.find(*places)
        return found if self._name in (discovery.REFERENCE, discovery.OPTIMIZED) else capabilities.of_others(found)

    def module(self, method: str) -> Any:
        """Their module or attribute for a method, in the package or in its ``baselines``; MISSING if there is none."""
        return Facade(self._name, *self._all_places(), guard=self.guard)._method(method)

    def _all_places(self) -> tuple[Any, ...]:
        places = self._places
        for folder in discovery.FOLDERS:
            inner = self._member(self._places[0], folder) if folder else MISSING
            places = places if inner is MISSING else (inner, *places)
        return places

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

    of_others = True  #: what the judge asks, which knows no harness

    def __init__(
        self, name: str, module: Any, pair: discovery.Pair, supported: Capabilities, guard: Guard
    ) -> None:
        self._name, self._module, self._pair, self._supported, self._guard = name, module, pair, supported, guard

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
        stats.record_access()
        result = _result_type(self._pair.reference, name)
        if not callable(found):
            return found
        qualified, ours = f"{self._name}.{name}", getattr(self._pair.reference, name)
        if isinstance(found, type):
            methods = _methods(ours)  # values, such as results, enumerations and clusters of heads, have none
            return _refusing(found, ours, methods, self._supported, qualified, self._guard) if methods else found
        return _judgeable(found, ours, self._supported, result, qualified, self._guard)

    def __repr__(self) -> str:
        return self._name


def _judgeable(
    function: Callable[..., Any], ours: Callable[..., Any], supported: Capabilities,
    result: type[tuple[Any, ...]] | None, name: str, guard: Guard, *, of_state: bool = False,
) -> Callable[..., Any]:
    """`function`, with refusals as NotProvided and its result as ours. ours: the reference's function."""
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if guard.calling:  # the implementation calls itself
            return function(*args, **kwargs)
        outside = capabilities.refusal(supported, _by_name(ours, args, kwargs))
        if outside is not None:
            _refused(f"{name}: {outside} (declared)")
        late = survival.over()
        if late is not None:
            stats.record_note(f"{name} is not called after {late}, the time of the run (--time-limit)")
            raise NotProvided(f"{name} within {late} (--time-limit)")
        try:
            with note_effects(name), survival.ending_calls(name), guard.call(name):
                returned = function(*args, **kwargs)
                returned = as_tensor(returned) if result is None else normalise(returned, result, name)
                if of_state:
                    check_attributes(args[0])
        except NotImplementedError as error:
            _refused(f"{name}: {wording.first_line(error)}")
        except Exception as error:
            limit = environment_limit(error)
            if limit is None:
                raise
            _refused(f"{ENVIRONMENT}{name}: {limit}", EnvironmentLimit(limit))
        stats.record_answer()
        return returned

    return call


def _methods(ours: type) -> tuple[str, ...]:
    """The public methods of a class of our reference, without static ones."""
    public = (name for name in dir(ours) if not name.startswith("_"))
    return tuple(name for name in public if inspect.isfunction(inspect.getattr_static(ours, name)))


def _refusing(
    found: type, ours: type, methods: Sequence[str], supported: Capabilities, name: str, guard: Guard
) -> type:
    """A subclass of the class `found` whose constructor and methods count, and may refuse."""
    def refusing(method: str, label: str) -> Callable[..., Any]:
        return _judgeable(
            getattr(found, method), getattr(ours, method), supported, None, label, guard, of_state=True
        )

    members: dict[str, Any] = {
        method: refusing(method, f"{name}.{method}") for method in methods if callable(getattr(found, method, None))
    }
    for attribute in dir(found):
        value = inspect.getattr_static(found, attribute, None)
        if isinstance(value, property) and value.fget is not None and not attribute.startswith("_"):
            get = guard.reading(f"{name}.{attribute}", _plain(value.fget))
            members[attribute] = property(get, value.fset, value.fdel)
    members["__init__"] = refusing("__init__", name)
    own = getattr(found, "__getattr__", None)

    def fallback(self: Any, attribute: str) -> Any:
        if own is None:
            raise absent(self, attribute)
        try:
            value = own(self, attribute)
        except AttributeError:
            raise absent(self, attribute) from None
        if value is None and is_read_by_the_suite(attribute, ours):
            raise absent(self, attribute)
        return value

    def read(self: Any, attribute: str) -> Any:
        value = found.__getattribute__(self, attribute)  # type: ignore[call-arg]
        if value is None and is_read_by_the_suite(attribute, ours):
            raise absent(self, attribute)
        return value

    members |= {"__getattr__": fallback, "__getattribute__": read}
    return type(found.__name__, (found,), {**members, "__module__": found.__module__})


def _plain(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: as_tensor(get(state))


def _by_name(ours: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call by parameter name."""
    try:
        return _signature(ours).bind_partial(*args, **kwargs).arguments
    except TypeError:  # a test of wrong arguments
        return kwargs


_signature = functools.cache(inspect.signature)


def _refused(what: str, error: NotProvided | None = None) -> NoReturn:
    """Count a refusal. Reject the example; outside of Hypothesis raise `error`, or NotProvided."""
    import hypothesis  # optional: this module is also imported without it

    from ..cases import supported  # imports hypothesis

    stats.record_refusal(what)
    if hypothesis.currently_in_test_context() and not supported.gives_up():
        hypothesis.reject()
    raise error or NotProvided(what)


def not_run(refused: Mapping[str, int]) -> NotProvided:
    """What a test raises if all of its examples were refused: EnvironmentLimit if the interpreter refused some."""
    limits = [what.removeprefix(ENVIRONMENT) for what in refused if what.startswith(ENVIRONMENT)]
    return EnvironmentLimit(", ".join(limits)) if limits else NotProvided(", ".join(refused))


def _result_type(module: ModuleType, name: str) -> type[tuple[Any, ...]] | None:
    """The NamedTuple that our function of this name returns; None for classes and functions that return a tensor."""
    function = getattr(module, name, None)
    if function is None or isinstance(function, type):
        return None
    returned = getattr(function, "__annotations__", {}).get("return")
    if isinstance(returned, str):
        returned = getattr(module, returned, None)
    return returned if isinstance(returned, type) and hasattr(returned, "_fields") else None


def _imported(name: str, guard: Guard) -> ModuleType:
    with guard.importing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # our tests turn warnings into errors; imports may raise deprecation warnings
        return importlib.import_module(name)


def _import(name: str, guard: Guard | None = None) -> ModuleType:
    """The module `name`. UsageError for what is no module's name, and if the import raises anything."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise pytest.UsageError(
            f"{naming.impl()} {name!r}: expected the name of a module, such as my_package.kernels, not a path"
        )
    try:
        return _imported(name, guard or Guard(name))
    except ImportError as error:
        raise pytest.UsageError(
            f"{naming.impl()} {name}: cannot import it: {error}{naming.hint()}"
        ) from error
    except (Exception, SystemExit) as error:
        raise pytest.UsageError(
            f"{naming.impl()} {name}: cannot import it: it raised {type(error).__name__}: {error}"
        ) from error
