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

from ..judge.oracle import Attention, attend
from . import contents
from .layouts import REPEATED, lay_out
from .layouts import of as layout_of

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
    """Arguments of a `decode_attention`: query [B, Hq, D], key and value [B, Hkv, S, D], masks, scale, per_head."""

    kind: ClassVar[str] = "decode"

    slots: int = 1
    occupancy: str = "full"
    protect: str = "none"
    per_head: bool = False

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
        return attend(self.query, self.key, self.value, self.occupied, scale=self.scale)

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


@dataclass(frozen=True, repr=False)
class WindowCase(Case):
    """A prompt of `tokens` tokens to compress: query_window [B, Hq, W, D], key and value [B, Hkv, T, D]."""

    kind: ClassVar[str] = "window"

    tokens: int = 1
    observers: int = 1
    budget: int = 1
    kernel_size: int = 5
    occupancy: str = "none"
    protect: str = "none"

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
            "scale": self.scale,
        }

    @property
    def score_inputs(self) -> dict[str, Any]:
        """Keyword arguments of `snapkv.window_score`, but for shared_heads."""
        return {
            name: value for name, value in self.snapkv_inputs.items() if name not in ("value", "budget", "protected")
        }

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `longflow.compress_prefill`."""
        return {**self.snapkv_inputs, "window": self.observers}

    @cached_property
    def attention(self) -> Attention:
        """The exact attention of the window's queries, for the bounds."""
        return attend(self.query_window, self.key, self.value, self.mask, scale=self.scale, causal=True)

    @classmethod
    def of(cls, query_window: Tensor, key: Tensor, value: Tensor, *, budget: int, kernel_size: int = 5,
           occupied: Tensor | None = None, protected: Tensor | None = None, scale: float | None = None) -> WindowCase:
        """Make a case from given tensors."""
        batch, heads, tokens, head_dim = key.shape
        case = cls(
            batch=batch, key_value_heads=heads, group=query_window.shape[1] // heads, head_dim=head_dim,
            dtype=key.dtype, content="given", scale=scale, tokens=tokens, observers=query_window.shape[2],
            budget=budget, kernel_size=kernel_size, device=str(key.device),
        )
        case._adopt({
            "query_window": query_window, "key": key, "value": value, "occupied": occupied, "protected": protected,
        })
        return case


#: Factors on the queries of layers 0, 1, 2, ..., again from the first one after the last. They are exact.
LAYER_FACTORS = (1.0, 0.125, 0.5, 0.0)


@dataclass(frozen=True, repr=False)
class StateTrace(Case):
    """A run of a method's State: a prompt of `prompt` tokens (0: none), then `steps` decode steps.

    reorder_at, reset_at: the steps before which the state is reordered by `order`, or reset; -1: never. after_reset:
    before the prompt, the state takes a longer one with numbers near the ends of their type, and is reset. turns: pairs
    (step, n): the tokens of the n steps from `step` on come as one block, by `append_block`. pages: slots of a page, if
    the state's tokens lie in pages (`paged_states.in_strided_pages`); 0: in tensors of its own.

    config: the keyword arguments of the method's config, as a tuple of pairs, so that traces are hashable. padding:
    the prompt's occupancy ("none": no mask). Tensors: prompt_query [B, Hq, T, D], prompt_key, prompt_value
    [B, Hkv, T, D], prompt_occupied [B, T]; query [B, Hq, n, D], key, value [B, Hkv, n, D] of n = steps tokens.

    twice: the layers get the prompt twice. The first time, all rows are reordered by `order` when the first layer has
    it. Then the states are reset, but not what they share.

    layers: of a method whose layers decide together, how many run (lockstep.Layers). The tensors of layer l from 1 on,
    which all have the same padding, have the names "l.prompt_query" and so on. Their queries are smaller than those of
    layer 0, by LAYER_FACTORS, so that layers differ in how sharply they attend.
    """

    kind: ClassVar[str] = "state"

    method: str = "longflow"
    config: tuple[tuple[str, Any], ...] = (("budget", 1),)
    prompt: int = 0
    padding: str = "none"
    steps: int = 1
    reorder_at: int = -1
    reset_at: int = -1
    after_reset: bool = False
    turns: tuple[tuple[int, int], ...] = ()
    pages: int = 0
    layers: int = 1
    twice: bool = False

    @property
    def order(self) -> Tensor:
        """[B] int64, the row that each row becomes: of three rows or more, not all of them, and one of them twice."""
        row = torch.arange(self.batch, device=self.device)
        return (row + 1) % max(1, self.batch - 1 if self.batch > 2 else self.batch)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the method's config, with `scale` only if it is given."""
        return dict(self.config) | ({} if self.scale is None else {"scale": self.scale})

    @property
    def sizes(self) -> dict[str, Any]:
        """Keyword arguments of the method's State, besides its config."""
        return {
            "batch": self.batch, "query_heads": self.query_heads, "key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim, "dtype": self.dtype, "device": torch.device(self.device),
        }

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        made = self._made(generator, None)
        for layer in range(1, self.layers):
            more = self._made(generator, made.get("prompt_occupied"))
            factor = LAYER_FACTORS[layer % len(LAYER_FACTORS)]
            made |= {
                f"{layer}.{name}": factor * tensor if "query" in name and tensor is not None else tensor
                for name, tensor in more.items() if name != "prompt_occupied"
            }
        return made

    def _made(self, generator: torch.Generator, occupied: Tensor | None) -> dict[str, Tensor | None]:
        """The tensors of a layer. occupied: the padding that another layer has already."""
        total = self.prompt + self.steps
        query, key, value = contents.fill(
            self.content, generator, batch=self.batch, key_value_heads=self.key_value_heads, group=self.group,
            queries=total, slots=total, head_dim=self.head_dim, dtype=self.dtype, scale=self.factor,
        )
        made: dict[str, Tensor | None] = {}
        parts = {"query": query, "key": key, "value": value}
        for name, tensor in parts.items():
            made[name] = tensor[:, :, self.prompt:].contiguous()
        if self.prompt:
            for name, tensor in parts.items():
                made[f"prompt_{name}"] = tensor[:, :, :self.prompt].contiguous()
            if self.padding != "none":
                if occupied is None:
                    occupied = contents.occupancy(self.padding, generator, (self.batch, self.prompt))
                for name in ("prompt_query", "prompt_key", "prompt_value"):
                    made[name] = contents.poison(self.poison, made[name], occupied)  # type: ignore[arg-type]
            made["prompt_occupied"] = occupied
        return made

    def place(self, name: str, tensor: Tensor) -> Tensor:
        if self.layout in REPEATED or "occupied" in name:
            return tensor
        return lay_out(tensor, layout_of(self.layout, name.rpartition(".")[2]))

    @property
    def prompt_inputs(self) -> dict[str, Tensor | None] | None:
        """Keyword arguments of State.prefill, or None without a prompt."""
        return self.prompt_of(0)

    def prompt_of(self, layer: int) -> dict[str, Tensor | None] | None:
        """The same for one of the layers."""
        self.used()
        if not self.prompt:
            return None
        made = {name: self.tensors[f"{_of_layer(layer)}prompt_{name}"] for name in ("query", "key", "value")}
        return {**made, "occupied": self.tensors["prompt_occupied"]}

    def before_reset(self, layer: int) -> dict[str, Tensor | None]:
        """The prompt of the sequence before, see `after_reset`: the prompt twice, with keys and values of both signs,
        so near the ends of their type that the difference of two is beyond it."""
        given = self.prompt_of(layer)
        assert given is not None
        largest = 0.6 * torch.finfo(self.dtype).max
        return {
            name: one if one is None else torch.cat(2 * [largest * one.sign() if name in ("key", "value") else one], -2)
            if one.dim() > 2 else torch.cat([one, one], -1) for name, one in given.items()
        }

    def step_inputs(self, step: int, layer: int = 0) -> dict[str, Tensor]:
        """Keyword arguments of State.step: query [B, Hq, D], key and value [B, Hkv, D]."""
        self.used()
        token = {name: self.tensor(_of_layer(layer) + name)[:, :, step] for name in ("query", "key", "value")}
        if self.layout == "contiguous":
            return {name: tensor.contiguous() for name, tensor in token.items()}
        return token


    def turn_inputs(self, step: int, tokens: int) -> dict[str, Tensor]:
        """Keyword arguments of State.append_block: the tokens of `tokens` steps from `step` on."""
        self.used()
        block = {name: self.tensor(name)[:, :, step:step + tokens] for name in ("query", "key", "value")}
        if self.layout == "contiguous":
            return {name: tensor.contiguous() for name, tensor in block.items()}
        return block


def _of_layer(layer: int) -> str:
    return f"{layer}." if layer else ""
