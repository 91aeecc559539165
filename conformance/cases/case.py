"""Cases: inputs for the twins, drawn by Hypothesis.

A case is a frozen dataclass of sizes, names and a seed; its tensors are made at first use. Hypothesis shrinks and
prints these fields, and the repr of a case creates it again. `save` writes the tensors too, so that a case from a GPU
can be replayed on any machine.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import contents
from .layouts import REPEATED, lay_out, layout_of
from .oracle import Attention, attend

#: Every kind of case by name; subclasses register themselves.
KINDS: dict[str, type[Case]] = {}

#: The most bytes of tensors in a file of a case.
MOST_SAVED = 2**26

#: What a file says beside the case: the judged function or state, the module that was judged, kvtwin's version.
ABOUT = ("subject", "implementation", "version")

#: The case whose inputs were used last, and the test that used them.
_latest: list[tuple[Case, str | None]] = []


def running_test() -> str | None:
    """The id of the running test; None outside of pytest."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0] or None


def forget() -> None:
    """Release the case that `latest` returns, since its tensors may take gigabytes."""
    _latest.clear()


def latest() -> Case | None:
    """The case that the running test used last. Hypothesis runs the smallest failing example last."""
    return next((case for case, test in _latest if test == running_test()), None)


def version() -> str:
    """The installed version of kvtwin, "" if it is not installed."""
    try:
        return importlib.metadata.version("kvtwin")
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, repr=False)
class Case:
    """Base class of all cases. Sizes: batch B, key_value_heads Hkv, group G query heads per KV head, head_dim D.

    content: what the numbers are like, such as "ordinary", "duplicates" or "overflow_88", and poison: what free slots
    hold (contents.py). layout: of the memory (layouts.py). scale: of query . key, None for head_dim ** -0.5. seed: of
    the numbers. A subclass sets its own `kind` and implements `make`. judge/checkers/<method>.py may define further
    subclasses.
    """

    kind: ClassVar[str] = ""
    #: Fields that fit others, so that another number does not do in their place (judge/served.py).
    fixed: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        KINDS[cls.kind] = cls

    batch: int = 1
    key_value_heads: int = 1
    group: int = 1
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    content: str = "ordinary"
    layout: str = "contiguous"
    poison: str = "nan"
    scale: float | None = None
    seed: int = 0
    device: str = "cpu"

    def __repr__(self) -> str:
        """The constructor call, without default values."""
        shown = [
            f"{field.name}={value!r}" for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis prints a falsifying example."""
        printer.text(repr(self))

    @property
    def query_heads(self) -> int:
        return self.key_value_heads * self.group

    @property
    def dtype_name(self) -> str:
        """The dtype of keys and values, as a verdict names it; "" if the case has no numbers."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def factor(self) -> float:
        """The scale, with the default resolved."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @cached_property
    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by name, in the case's memory layout."""
        return {
            name: None if tensor is None else self.place(name, tensor) for name, tensor in self.make().items()
        }

    def make(self) -> dict[str, Tensor | None]:
        raise NotImplementedError

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """Convert `tensor` to the case's layout. If the layout repeats an axis, its first entry is repeated."""
        return lay_out(tensor, layout_of(self.layout, name))

    def tensor(self, name: str) -> Tensor:
        found = self.tensors[name]
        assert found is not None
        return found

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def used(self) -> None:
        _latest[:] = [(self.__dict__.get("_whole", self), running_test())]

    def part_of(self, whole: Case, tensors: dict[str, Tensor | None]) -> None:
        """Make this case a part of another one, with these tensors of it. A failure saves the whole."""
        self._adopt(tensors)
        self.__dict__["_whole"] = whole

    def save(self, path: Path | str, subject: str | None = None, implementation: str | None = None) -> str:
        """Write the case, and the names of the judged function or state (`subjects.Subject`) and of the module that was
        judged, if they are given. Returns the command that replays it. The tensors of a case of more than MOST_SAVED
        bytes are not written, but made again from its seed, on a device of the same kind."""
        from safetensors.torch import save_file

        found = {name: tensor for name, tensor in self.tensors.items() if tensor is not None}
        absent = [name for name in self.tensors if name not in found]
        made = self.content != "given" and sum(one.numel() * one.element_size() for one in found.values()) > MOST_SAVED
        # Copy: a case may hold one tensor under two names, which safetensors rejects.
        tensors = {} if made else {
            name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()
        }
        more = {"made_on": self.device} if made else {}
        about = dict(zip(ABOUT, (subject, implementation, version()), strict=True))
        description = {"absent": absent, **about, **more, **self.described()}
        save_file(tensors, path, metadata={"kvtwin": json.dumps(description)})
        return f"kvtwin replay {path}"

    def described(self) -> dict[str, Any]:
        """The kind and the fields as values that JSON has, for `saved.from_description`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **fields, "dtype": str(self.dtype).removeprefix("torch.")}

    def _adopt(self, tensors: dict[str, Tensor | None]) -> None:
        self.__dict__["tensors"] = tensors


@dataclass(frozen=True, repr=False)
class DecodeCase(Case):
    """Arguments of a `decode_attention`: query [B, Hq, D], key and value [B, Hkv, S, D], masks, scale, per_head.
    softcap, sink_logits [Hq]: of a state's step alone, which functions do not take."""

    kind: ClassVar[str] = "decode"

    slots: int = 1
    occupancy: str = "full"
    protect: str = "none"
    per_head: bool = False
    softcap: float | None = None

    query = property(lambda self: self.tensor("query"))
    key = property(lambda self: self.tensor("key"))
    value = property(lambda self: self.tensor("value"))
    occupied = property(lambda self: self.tensor("occupied"))
    protected = property(lambda self: self.tensors["protected"])

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        tokens = contents.fill(
            self.content, generator, batch=self.batch, key_value_heads=self.key_value_heads, group=self.group,
            queries=1, slots=self.slots, head_dim=self.head_dim, dtype=self.dtype, scale=self.factor,
        )
        shape = (self.batch, self.key_value_heads, self.slots) if self.per_head else (self.batch, self.slots)
        occupied = contents.occupancy(self.occupancy, generator, shape)
        protected = contents.protection(self.protect, generator, shape)
        key, value = tokens.key, tokens.value
        if self.layout not in REPEATED:
            key, value = (contents.poison(self.poison, tensor, occupied) for tensor in (key, value))
        return {
            "query": tokens.query[:, :, 0], "key": key, "value": value, "occupied": occupied, "protected": protected,
        }

    def place(self, name: str, tensor: Tensor) -> Tensor:
        # Only keys and values have a repeated axis.
        if self.layout in REPEATED and name not in ("key", "value"):
            return tensor
        return lay_out(tensor, layout_of(self.layout, name))

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `decode_attention`."""
        self.used()
        return {
            "query": self.query, "key": self.key, "value": self.value, "occupied": self.occupied,
            "protected": self.protected, "scale": self.scale, "per_head": self.per_head,
        }

    @cached_property
    def attention(self) -> Attention:
        """The exact attention, for the bounds."""
        return attend(
            self.query, self.key, self.value, self.occupied, scale=self.scale, softcap=self.softcap,
            sink_logits=self.tensors.get("sink_logits"),
        )

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None, *,
           protected: Tensor | None = None, scale: float | None = None, per_head: bool = False) -> DecodeCase:
        """Make a case from given tensors."""
        batch, heads, slots, head_dim = key.shape
        if occupied is None:
            occupied = torch.ones(
                (batch, heads, slots) if per_head else (batch, slots), dtype=torch.bool, device=key.device
            )
        case = cls(
            batch=batch, key_value_heads=heads, group=query.shape[1] // heads, head_dim=head_dim, dtype=key.dtype,
            content="given", scale=scale, slots=slots, per_head=per_head, device=str(key.device),
        )
        case._adopt({"query": query, "key": key, "value": value, "occupied": occupied, "protected": protected})
        return case

    def changed(self, *, softcap: float | None, sink_logits: Tensor | None) -> DecodeCase:
        """The case with this softcap and these sinks."""
        case = dataclasses.replace(self, softcap=softcap)
        case._adopt({**self.tensors, "sink_logits": sink_logits})
        return case


@dataclass(frozen=True, repr=False)
class WindowCase(Case):
    """A prompt of `tokens` tokens to compress: query_window [B, Hq, W, D], key and value [B, Hkv, T, D]. prefix_alone:
    LongFlow's option, which is among the arguments if it is True. softcap, sink_logits [Hq]: of a state's prompt alone,
    which functions do not take."""

    kind: ClassVar[str] = "window"

    tokens: int = 1
    observers: int = 1
    budget: int = 1
    kernel_size: int = 5
    occupancy: str = "none"
    protect: str = "none"
    prefix_alone: bool = False
    softcap: float | None = None

    query_window = property(lambda self: self.tensor("query_window"))
    key = property(lambda self: self.tensor("key"))
    value = property(lambda self: self.tensor("value"))
    occupied = property(lambda self: self.tensors["occupied"])
    protected = property(lambda self: self.tensors["protected"])

    @property
    def mask(self) -> Tensor:
        """occupied, all True if it was not given."""
        if self.occupied is not None:
            return self.occupied
        return torch.ones(self.batch, self.tokens, dtype=torch.bool, device=self.device)

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        query, key, value = contents.fill(
            self.content, generator, batch=self.batch, key_value_heads=self.key_value_heads, group=self.group,
            queries=self.observers, slots=self.tokens, head_dim=self.head_dim, dtype=self.dtype, scale=self.factor,
        )
        shape = (self.batch, self.tokens)
        occupied = None if self.occupancy == "none" else contents.occupancy(self.occupancy, generator, shape)
        if occupied is not None:
            # Padding in the window holds zeros.
            padding = ~occupied[:, None, self.tokens - self.observers:, None]
            query = query.masked_fill(padding, 0)
            key, value = (contents.poison(self.poison, tensor, occupied) for tensor in (key, value))
        return {
            "query_window": query, "key": key, "value": value, "occupied": occupied,
            "protected": contents.protection(self.protect, generator, shape),
        }

    @property
    def snapkv_inputs(self) -> dict[str, Any]:
        """Keyword arguments of `snapkv.compress`, but for shared_heads."""
        self.used()
        return {
            "query_window": self.query_window, "key": self.key, "value": self.value, "budget": self.budget,
            "kernel_size": self.kernel_size, "occupied": self.occupied, "protected": self.protected,
            "scale": self.scale, **({"prefix_alone": True} if self.prefix_alone else {}),
        }

    @property
    def score_inputs(self) -> dict[str, Any]:
        """Keyword arguments of `snapkv.window_score`, but for shared_heads."""
        inputs = {**self.snapkv_inputs, **self._changes}
        return {name: value for name, value in inputs.items() if name not in ("value", "budget", "protected")}

    @property
    def _changes(self) -> dict[str, Any]:
        """The softcap and the sinks, if there are any."""
        given = {"softcap": self.softcap, "sink_logits": self.tensors.get("sink_logits")}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `longflow.compress_prefill`."""
        return {**self.snapkv_inputs, "window": self.observers}

    @cached_property
    def attention(self) -> Attention:
        """The exact attention of the window's queries, for the bounds."""
        found = attend(
            self.query_window, self.key, self.value, self.mask, scale=self.scale, causal=True, **self._changes
        )
        return found.before(self.tokens - self.observers) if self.prefix_alone else found

    @classmethod
    def of(cls, query_window: Tensor, key: Tensor, value: Tensor, *, budget: int, kernel_size: int = 5,
           occupied: Tensor | None = None, protected: Tensor | None = None, scale: float | None = None,
           prefix_alone: bool = False, softcap: float | None = None,
           sink_logits: Tensor | None = None) -> WindowCase:
        """Make a case from given tensors."""
        batch, heads, tokens, head_dim = key.shape
        case = cls(
            batch=batch, key_value_heads=heads, group=query_window.shape[1] // heads, head_dim=head_dim,
            dtype=key.dtype, content="given", scale=scale, tokens=tokens, observers=query_window.shape[2],
            budget=budget, kernel_size=kernel_size, device=str(key.device), prefix_alone=prefix_alone,
            softcap=softcap,
        )
        case._adopt({
            "query_window": query_window, "key": key, "value": value, "occupied": occupied, "protected": protected,
            "sink_logits": sink_logits,
        })
        return case
