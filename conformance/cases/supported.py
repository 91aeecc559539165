"""What strategies may draw for the implementation under test: the options that its `Capabilities` include.

If none of a test's options is included, the example is rejected, and the test is *not provided*. A strategy asks for
options that do not depend on what it draws before it draws anything: then Hypothesis knows after one rejected example
that there is no other, and it would try 458.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from hypothesis import strategies as st

from .. import capabilities, stats

T = TypeVar("T")

#: Options under which no slot is free, and none is protected.
NO_MASK = ("full", "none")

#: So many refusals of one dtype end the search for a case of it. Hypothesis would go on to 458.
MOST_REFUSALS = 100

_only: ContextVar[str | None] = ContextVar("kvtwin_only_dtype", default=None)
_refusals: ContextVar[list[None] | None] = ContextVar("kvtwin_refusals_of_dtype", default=None)


def among(options: Iterable[T], fits: Callable[[T], bool], what: str) -> list[T]:
    """The options that fit. Rejects the example if none does; `what` names the capability."""
    found = [option for option in options if fits(option)]
    if not found:
        import hypothesis

        stats.record_refusal(f"not declared: {what}")
        hypothesis.reject()
    return found


def sizes(name: str, usual: Sequence[int]) -> Sequence[int]:
    """`head_dims`, `groups`, `kv_heads` or `page_sizes`: the declared ones among the usual, or all declared ones if
    none is usual."""
    declared: tuple[int, ...] | None = getattr(capabilities.current(), name)
    if declared is None:
        return usual
    return [size for size in usual if size in declared] or declared


def size(name: str, value: int) -> bool:
    """True if the size is among the declared `head_dims`, `groups` or `kv_heads`."""
    declared: tuple[int, ...] | None = getattr(capabilities.current(), name)
    return declared is None or value in declared


def shape(batch: int, key_value_heads: int, group: int) -> bool:
    """True if these sizes are declared."""
    return rows(batch) == batch and size("kv_heads", key_value_heads) and size("groups", group)


def rows(most: int) -> int:
    """The largest batch."""
    largest = capabilities.current().max_batch
    return most if largest is None else min(most, largest)


@contextmanager
def only_dtype(name: str) -> Iterator[None]:
    """Inside the ``with`` block strategies draw this dtype alone, where it is one of theirs: a dtype or an FP8 type,
    named as in `Capabilities`."""
    tokens = _only.set(name), _refusals.set([])
    try:
        yield
    finally:
        _only.reset(tokens[0])
        _refusals.reset(tokens[1])


def gives_up() -> bool:
    """Called for each refusal by the implementation under test: True if it refuses too much of `only_dtype`."""
    refusals = _refusals.get()
    if refusals is None:
        return False
    refusals.append(None)
    return len(refusals) >= MOST_REFUSALS


def dtypes(options: Iterable[Any]) -> list[Any]:
    """The torch dtypes among `options`."""
    return _chosen(among(options, lambda one: _name(one) in capabilities.current().dtypes, "dtypes"))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _chosen(options: list[Any]) -> list[Any]:
    """That of `only_dtype`, if it is among them; otherwise all."""
    return [one for one in options if _name(one) == _only.get()] or options


def occupancies(options: Iterable[str]) -> list[str]:
    return among(options, lambda one: capabilities.current().masks or one in NO_MASK, "masks")


def protected() -> bool:
    """True if an argument `protected` is supported."""
    return capabilities.current().protected


def protections(options: Iterable[str]) -> list[str]:
    return among(options, lambda one: capabilities.current().protected or one == "none", "protected")


def layouts(options: Iterable[str]) -> list[str]:
    contiguous_only = capabilities.current().contiguous_only
    return among(options, lambda one: not contiguous_only or one == "contiguous", "contiguous_only")


def scales(options: Iterable[float | None]) -> list[float | None]:
    return among(options, lambda one: capabilities.current().scale or one is None, "scale")


def per_head(options: Iterable[bool] = (False, True)) -> list[bool]:
    return among(options, lambda one: one in capabilities.current().per_head, "per_head")


def mask_per_head() -> st.SearchStrategy[bool]:
    """Whether the mask of occupied slots has an axis for KV heads."""
    return st.booleans() if capabilities.current().masks else st.just(False)


def page_sizes(usual: Sequence[int], slots: int, last_page: str) -> list[int]:
    """The sizes of pages for so many slots, which are rounded up to whole pages unless the last page is "partial".
    Pages that can be partial have more than one slot, if such sizes are declared."""
    can = capabilities.current()

    def fits(size: int) -> bool:
        rounded = slots if last_page == "partial" else -(-slots // size) * size
        return rounded % can.slots_multiple_of == 0 and (can.max_slots is None or rounded <= can.max_slots)

    found = among(sizes("page_sizes", usual), fits, "page_sizes")
    return [size for size in found if size > 1 or last_page != "partial"] or found


def fp8(options: Iterable[Any]) -> list[Any]:
    """The FP8 types among `options`."""
    return _chosen(among(options, lambda one: _name(one) in capabilities.current().fp8, "fp8"))


def values(name: str, options: Iterable[T]) -> list[T]:
    """The values of another argument (`Capabilities.options`)."""
    return among(options, lambda one: option(name, one), name)


def option(name: str, value: Any) -> bool:
    """True if another argument may have this value."""
    declared = capabilities.current().options.get(name)
    return declared is None or value in declared


def undeclared(given: dict[str, Any], made: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The options of the config `made` with a value, in `given` or by default, that is not declared
    (`Capabilities.options` and `per_head`), and the values that are."""
    can = capabilities.current()
    declared = {"per_head": can.per_head, "shared_heads": tuple(not one for one in can.per_head), **can.options}
    values = {
        name: one.default for name, one in inspect.signature(made).parameters.items() if one.default is not one.empty
    } | given
    found = ((name, declared.get(name)) for name in values)
    return {name: some for name, some in found if some is not None and values[name] not in some}


def config(drawn: dict[str, Any], made: Callable[..., Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The keyword arguments `drawn` of the config `made`, with declared values in place of those that are not."""
    others = undeclared(drawn, made)
    if not others:
        return st.just(drawn)
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in others.items()}).map(
        lambda chosen: among([{**drawn, **chosen}], functools.partial(_is_accepted, made), ", ".join(others))[0]
    )


def _is_accepted(made: Callable[..., Any], options: dict[str, Any]) -> bool:
    try:
        made(**options)
    except (TypeError, ValueError):
        return False
    return True


def slots(least: int, most: int) -> tuple[int, int, int]:
    """The least and the most slots, in units of the third number."""
    can = capabilities.current()
    unit = can.slots_multiple_of
    if can.max_slots is not None:
        largest = can.max_slots
        among([least], lambda one: one <= largest, "max_slots")
        most = min(most, largest)
    first = -(-least // unit)
    return first, max(first, most // unit), unit
