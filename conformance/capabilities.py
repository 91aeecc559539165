"""What an implementation supports and which conventions it follows: `Capabilities`, declared once in its module.

```python
from kvtwin.conformance import Capabilities

CAPABILITIES = Capabilities(dtypes=("float16",), head_dims=(64, 128), masks=False, ties="any")
```

The suite looks for `CAPABILITIES` in a method's module, then in the implementation's. Strategies draw inside of it, a
call outside of it is not made, and the verdict lists what it leaves out. This module imports neither torch nor pytest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

#: The attribute of an implementation's module.
ATTRIBUTE = "CAPABILITIES"
DTYPES = ("float32", "float16", "bfloat16")
#: Types of FP8 keys and values.
FP8 = ("float8_e4m3fn", "float8_e5m2")
DEVICES = ("cpu", "cuda")
#: The values of each convention; the first is kvtwin's.
#: Arguments for what released code does where its paper says otherwise or nothing, with all values. Implementations are
#: tested with the first, and with the others only if they declare them: code that follows the paper need not know them.
READINGS = {"prefix_alone": (False, True), "order": ("position", "score"), "spread": ("deviation", "variance")}
#: The same for what models have, not methods: code need not know that logits can be capped.
ALL: dict[str, tuple[Any, ...] | None] = {**READINGS, "softcap": None}
UNDECLARED = {name: values[:1] for name, values in READINGS.items()} | {"softcap": (None,)}
CONVENTIONS = {"ties": ("lowest", "any"), "slot_order": ("fixed", "any"), "free_score": ("-inf", "any")}


@dataclass(frozen=True)
class Capabilities:
    """What an implementation takes. By default: everything that kvtwin's own takes, by its conventions.

    - dtypes: names or torch dtypes of query, key and value.
    - fp8: those of FP8 keys and values, for functions that take them; (): none. The query's are among `dtypes`.
    - head_dims, groups, kv_heads: the supported sizes; None: any. A group is the number of query heads per KV head.
    - max_batch, max_slots: the largest batch and number of slots or tokens; None: any.
    - slots_multiple_of: the number of slots or tokens is a multiple of it.
    - page_sizes: the supported numbers of slots in a page, for functions and states over pages; None: any.
    - masks: free slots and padding (an `occupied` with False in it). protected: an argument `protected`.
    - scale: another scale than head_dim^-0.5.
    - per_head: which choices it makes: one per KV head (True), one for all KV heads of a row (False).
    - contiguous_only: it takes contiguous tensors alone.
    - devices: "cpu", "cuda".
    - options: the supported values of further arguments, by name: {"kernel_size": (5,)}; None: any. Those of released
      code (`prefix_alone=True` of LongFlow, `order="score"` of R-KV, `spread="variance"` of EpiKV) and a `softcap` are
      tested only if they are declared here.

    Conventions:

    - ties: "lowest": among equal tokens the lowest index is evicted first; "any": any of them, and either code for a
      number half-way between two.
    - slot_order: of states: "fixed": a token stays in its slot, and a new one takes the evicted one's; "any": slots
      are compared by the positions of their tokens, a state may have fewer free slots than kvtwin's, and any of equal
      tokens may be evicted first. It does not apply to ThinKV, whose slots follow its block table, nor to
      methods that evict nothing: their slots are compared as they are, and the verdict says so.
    - free_score: the score of a free slot: "-inf", or "any".
    - validates_arguments: False if wrong arguments need not raise errors.

    Raises TypeError or ValueError for a value that makes no sense.
    """

    dtypes: tuple[Any, ...] = DTYPES
    fp8: tuple[Any, ...] = FP8
    head_dims: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    max_batch: int | None = None
    max_slots: int | None = None
    slots_multiple_of: int = 1
    page_sizes: tuple[int, ...] | None = None
    masks: bool = True
    protected: bool = True
    scale: bool = True
    per_head: tuple[bool, ...] = (False, True)
    contiguous_only: bool = False
    devices: tuple[str, ...] = DEVICES
    options: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    ties: str = "lowest"
    slot_order: str = "fixed"
    free_score: str = "-inf"
    validates_arguments: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(map(_name, _several(self, "dtypes"))))
        _among("dtypes", self.dtypes, DTYPES)
        if self.fp8 != ():
            object.__setattr__(self, "fp8", tuple(map(_name, _several(self, "fp8"))))
            _among("fp8", self.fp8, FP8)
        _among("devices", _several(self, "devices"), DEVICES)
        _among("per_head", _several(self, "per_head"), (False, True))
        for name in ("head_dims", "groups", "kv_heads", "page_sizes"):
            if getattr(self, name) is not None:
                for number in _several(self, name):
                    _positive(name, number)
        for name in ("max_batch", "max_slots", "slots_multiple_of"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("masks", "protected", "scale", "contiguous_only", "validates_arguments"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name, values in CONVENTIONS.items():
            _among(name, (getattr(self, name),), values)
        options = self.options
        if not isinstance(options, Mapping) or not all(isinstance(found, tuple | None) for found in options.values()):
            raise TypeError(f"options must map names to tuples of values or None, got {self.options!r}")
        if self.max_slots is not None and self.max_slots < self.slots_multiple_of:
            raise ValueError(f"max_slots must be at least slots_multiple_of = {self.slots_multiple_of}, "
                             f"got {self.max_slots}")

    def outside(self) -> list[str]:
        """What the declaration leaves out of the tests, one line each."""
        lines = []
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name in CONVENTIONS or one.name in ("options", "validates_arguments") or value == one.default:
                continue
            lines.append(f"{one.name} = {_shown(value)}")
        told = {name: values for name, values in self.options.items() if values not in (UNDECLARED.get(name), None)}
        lines += [f"{name} = {_shown(values)}" for name, values in told.items()]
        return lines

    def conventions(self) -> list[str]:
        """The conventions that differ from kvtwin's."""
        return [name for name, values in CONVENTIONS.items() if getattr(self, name) != values[0]]


def _shown(value: Any) -> str:
    if value == ():
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _several(capabilities: Capabilities, name: str) -> tuple[Any, ...]:
    found = getattr(capabilities, name)
    if not isinstance(found, tuple) or not found:
        raise TypeError(f"{name} must be a tuple with at least one value, got {found!r}")
    return found


def _among(name: str, values: tuple[Any, ...], allowed: tuple[Any, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must hold ints, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


_current: ContextVar[Capabilities | None] = ContextVar("kvtwin_capabilities", default=None)


def current() -> Capabilities:
    """The capabilities of the implementation that the running test calls. They never change while a test runs."""
    return _current.get() or DEFAULT


@contextmanager
def use(capabilities: Capabilities) -> Iterator[None]:
    """Let strategies and comparators follow `capabilities` inside the ``with`` block."""
    token = _current.set(capabilities)
    try:
        yield
    finally:
        _current.reset(token)


def find(*places: Any) -> Capabilities:
    """The `CAPABILITIES` of the first of `places` (modules) that has one; the default if none has.

    Raises TypeError if it is not a `Capabilities`.
    """
    for place in places:
        found = getattr(place, ATTRIBUTE, None)
        if found is None:
            continue
        if not isinstance(found, Capabilities):
            raise TypeError(f"{ATTRIBUTE} of {getattr(place, '__name__', place)!r} must be a "
                            f"kvtwin.conformance.Capabilities, got {type(found).__name__}")
        return found
    return DEFAULT


def of_others(found: Capabilities) -> Capabilities:
    """What an implementation supports that declares this, and is not kvtwin's."""
    return dataclasses.replace(found, options={**UNDECLARED, **found.options})


def refusal(capabilities: Capabilities, arguments: Mapping[str, Any]) -> str | None:
    """The first capability that the arguments of a call are outside of; None if they are inside of all.

    arguments: those of a method's function, or of a state's constructor, `prefill` or `step`, by parameter name. Wrong
    ones, which have no such sizes, or a dtype or device that nobody can declare, are left to the implementation.
    """
    if not (capabilities.options or capabilities.outside()):
        return None
    try:
        facts = dict(_of_sizes(arguments)) | dict(_of_tensors(arguments)) | dict(_of_options(arguments))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    known = {name: value for name, value in facts.items() if value in _DECLARABLE.get(name, (value,))}
    return next((name for name, value in known.items() if not _inside(capabilities, name, value)), None)


#: Fact -> all values of it that an implementation can declare. Another value is a wrong argument.
_DECLARABLE = {"dtypes": DTYPES, "fp8": FP8, "devices": DEVICES}


def _inside(capabilities: Capabilities, name: str, value: Any) -> bool:
    """True if a call with this fact is supported. Facts have the names of fields, or of options."""
    supported = getattr(capabilities, name) if name in _FIELDS else capabilities.options.get(name)
    if supported is None:
        return True
    if name in ("max_batch", "max_slots"):
        return bool(value <= supported)
    if name == "slots_multiple_of":
        return bool(value % supported == 0)
    if name in ("masks", "protected", "scale"):
        return bool(supported) or not value
    if name == "contiguous_only":
        return not supported or bool(value)
    return value in supported


def _of_sizes(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Facts from the arguments of a state's constructor."""
    for argument, name in (("batch", "max_batch"), ("head_dim", "head_dims"), ("key_value_heads", "kv_heads")):
        if isinstance(arguments.get(argument), int):
            yield name, arguments[argument]
    if isinstance(arguments.get("query_heads"), int) and isinstance(arguments.get("key_value_heads"), int):
        yield "groups", arguments["query_heads"] // arguments["key_value_heads"]
    if arguments.get("dtype") is not None:
        yield "dtypes", _name(arguments["dtype"])
    if arguments.get("device") is not None:
        yield "devices", str(arguments["device"]).split(":")[0]


def _of_tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Facts from query, key and value: [B, H, D], or [B, H, S, D]; from a row's key_segment, [H, S, D] or [S, D]; and
    from x, [..., S, D], which is keys or values too."""
    several, rowless = ("query", "query_window", "key", "value"), ("key_segment", "x")
    given: dict[str, Any] = {name: arguments.get(name) for name in (*several, *rowless)}
    tensors = {
        name: tensor for name, tensor in given.items()
        if hasattr(tensor, "is_contiguous") and tensor.dim() >= (2 if name in rowless else 3)
    }
    pages: Any = arguments.get("pages")
    if hasattr(pages, "_asdict"):
        tensors |= {name: tensor for name, tensor in pages._asdict().items() if name != "block_table"}
        yield from _of_pages(pages, tensors.get("query"), arguments.get("occupied"))
    for name, tensor in tensors.items():
        yield "fp8" if _name(tensor.dtype).startswith("float8") else "dtypes", _name(tensor.dtype)
        yield "devices", tensor.device.type
        yield "head_dims", tensor.shape[-1]
        if name in several:
            yield "max_batch", tensor.shape[0]
    if tensors:
        yield "contiguous_only", all(tensor.is_contiguous() for tensor in tensors.values())
    segment = tensors.get("key_segment")
    if segment is not None:
        yield "kv_heads", segment.shape[0] if segment.dim() == 3 else 1
    key = tensors.get("key")
    if key is None:
        return
    yield "kv_heads", key.shape[1]
    query = tensors.get("query", tensors.get("query_window"))
    if query is not None:
        yield "groups", query.shape[1] // key.shape[1]
    if key.dim() == 4:
        yield "max_slots", key.shape[2]
        yield "slots_multiple_of", key.shape[2]


def _of_pages(pages: Any, query: Any, occupied: Any) -> Iterator[tuple[str, Any]]:
    """Facts from caches [pages, page_size, Hkv, D], and from the mask of the slots that lie in them."""
    _, page_size, heads, _ = pages.key_cache.shape
    yield "page_sizes", page_size
    yield "kv_heads", heads
    if query is not None:
        yield "groups", query.shape[1] // heads
    if hasattr(occupied, "shape"):
        yield "max_slots", occupied.shape[-1]
        yield "slots_multiple_of", occupied.shape[-1]


def _of_options(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Facts from masks, and from the other arguments, which may be in a config."""
    config = arguments.get("config")
    given: dict[str, Any] = dict(vars(config)) if dataclasses.is_dataclass(config) else {}
    given |= {name: value for name, value in arguments.items() if value is not None}
    occupied: Any = given.get("occupied")
    protected: Any = given.get("protected")
    yield "masks", hasattr(occupied, "all") and not bool(occupied.all())
    yield "protected", hasattr(protected, "any") and bool(protected.any())
    yield "scale", given.get("scale") is not None
    if isinstance(given.get("shared_heads"), bool):
        yield "per_head", not given["shared_heads"]
    if isinstance(given.get("per_head"), bool):
        yield "per_head", given["per_head"]
    yield from ((name, value) for name, value in given.items() if name not in _FIELDS)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


_FIELDS = {one.name for one in dataclasses.fields(Capabilities)} - {"options"}

#: Everything that kvtwin's own implementations take.
DEFAULT = Capabilities()
