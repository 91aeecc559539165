"""A run of a method's state: the tensors of its prompt and of its steps, and what happens when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import contents
from .case import Case
from .layouts import REPEATED, lay_out, layout_of

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

    sink_logits: the query heads have attention sinks.

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
    sink_logits: bool = False

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
        made = {
            "batch": self.batch, "query_heads": self.query_heads, "key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim, "dtype": self.dtype, "device": torch.device(self.device),
        }
        sinks = torch.linspace(2, -1, self.query_heads, device=self.device)
        return {**made, "sink_logits": sinks} if self.sink_logits else made

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
