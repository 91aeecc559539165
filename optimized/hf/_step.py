"""One decode step as a graph: its arguments, its output, and what the host does for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Signature
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...reference.hf.cache_adapter import NAMES, StateCache
from ...reference.hf.cache_adapter_layer import StateLayer
from .._common import graph
from .._common.state import State
from ._host import PACKAGE, SIMPLE, NotReplayable, Snapshot, parts, places

#: Modules that may ask the cache how many tokens it has seen, because nothing on the device depends on the answer: the
#: masks of kvtwin's attention have no elements.
MAY_ASK = (
    "transformers.masking_utils", "transformers.cache_utils", f"{PACKAGE}.reference.", f"{PACKAGE}.optimized.",
)


def phase_of(cache: StateCache, seen: int) -> Hashable:
    """What the host decides in the next step of a cache that has seen so many tokens; None if the step has to run on
    the host: it may raise an error. NotReplayable for a cache that has no graphs."""
    phases = []
    for layer in cache.layers:
        if not isinstance(layer, StateLayer):
            raise NotReplayable(f"the cache has a {type(layer).__name__}, whose memory changes in each step")
        state = layer.state
        if state is not None and not isinstance(state, State):
            raise NotReplayable(f"a {type(cache).__name__} of {type(state).__module__} is none of kvtwin.optimized.hf")
        phases.append(layer.phase(seen) if state is not None and state._takes_a_step else None)
    if None in phases or not phases:
        return None
    return phases[0] if phases.count(phases[0]) == len(phases) else tuple(phases)


def arguments_of(
    given: dict[str, Any], signature: Signature, seen: int, device: torch.device
) -> tuple[dict[str, Any], tuple[Hashable, ...]]:
    """The arguments of a step except the cache and the mask, among them position_ids, from which models rotate, and
    what they have in common with those of other steps of a graph. NotReplayable for any that a graph could not have."""
    if given.get("position_ids") is None:
        if "position_ids" not in signature.parameters or given.get("attention_mask") is not None:
            raise NotReplayable("the model gets no position_ids, which generate passes")
        given = {**given, "position_ids": torch.full((1, 1), seen, dtype=torch.int64, device=device)}
    kept: dict[str, Any] = {}
    kind: list[tuple[Hashable, ...]] = []
    for name in sorted(given):
        if name in (*NAMES, "attention_mask"):
            continue
        kept[name] = value = given[name]
        if isinstance(value, Tensor):
            if value.device != device:
                raise NotReplayable(f"the argument {name} is on {value.device}, and the cache on {device}")
            kind.append((name, value.shape, value.dtype))
        elif isinstance(value, SIMPLE):
            kind.append((name, value))
        else:
            raise NotReplayable(f"the argument {name} is a {type(value).__name__}, neither a tensor nor a number")
    return kept, tuple(kind)


def no_padding(layer: Any, mask: object, position_ids: Tensor | None, seen: int) -> bool | Tensor:
    """Whether no new token is padding: see `StateLayer.no_padding`. NotReplayable for masks that do not say so."""
    tokens: bool | Tensor | None = layer.no_padding(mask, position_ids, seen)
    if tokens is None:
        raise NotReplayable("attention_mask must have the two dimensions of tokens, with the cache's and one more")
    return tokens


class Step:
    """The graph of a decode step: its static inputs, its output, and what a replay adds to numbers on the host."""

    def __init__(self, forward: Callable[..., Any], cache: StateCache, given: dict[str, Any], pool: graph.Pool) -> None:
        """Capture forward(**given) with this cache, which stays as it is."""
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
        self._targets = list(self._inputs.values())
        before = Snapshot(cache)
        self._places = places(parts(cache))
        made: list[Any] = []

        def run() -> None:
            with _watched(cache):
                output = forward(**{**given, **self._inputs}, attention_mask=None, **cache.argument)
            made.append(_without(cache, output))
            join = getattr(cache, "join", None)
            if join is not None:
                join()                              # transfers that run beside the step are a part of it

        try:
            self._launch = graph.captured(run, pool)
            self._advances = before.advances()
        except BaseException:
            before.restore()
            raise
        self._output = made[0]
        self._count(-1)

    def fits(self, objects: Sequence[object]) -> bool:
        """Whether a replay works on the tensors of these objects, of which the cache consists now."""
        return places(objects) == self._places

    def _count(self, times: int = 1) -> None:
        """Do the host's part of so many steps."""
        for attributes, name, by in self._advances:
            attributes[name] += by * times

    def replay(self, given: dict[str, Any], cache: StateCache) -> Any:
        """Launch the step, then do the host's part. Returns the output of the forward pass, in tensors of its own. An
        error of the launch leaves the cache as it was."""
        torch._foreach_copy_(self._targets, [given[name] for name in self._inputs])
        self._launch()
        self._count()
        return _with(cache, self._output)


@contextmanager
def _watched(cache: StateCache) -> Iterator[None]:
    """A context in which a model may not ask for the number of tokens, which a graph would have as a constant."""
    ask = cache.get_seq_length

    def get_seq_length(layer_idx: int = 0) -> int:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if not asks.startswith(MAY_ASK):
            raise NotReplayable(f"{asks} computes with the number of tokens in the cache, on the host")
        return ask(layer_idx)

    cache.get_seq_length = get_seq_length
    try:
        yield
    finally:
        del cache.get_seq_length


class _Cache:
    """Stands in an output for the cache, which the graph must not keep alive."""


def _without(cache: StateCache, output: Any) -> Any:
    if output is cache:
        return _Cache
    if output is None or isinstance(output, (Tensor, *SIMPLE)):
        return output
    return _rebuilt(output, lambda value: _without(cache, value))


def _with(cache: StateCache, output: Any) -> Any:
    """The output in new tensors: the next replay overwrites those of the graph."""
    if output is _Cache:
        return cache
    if isinstance(output, Tensor):
        return output.clone()
    if output is None or isinstance(output, SIMPLE):
        return output
    return _rebuilt(output, lambda value: _with(cache, value))


def _rebuilt(output: Any, inner: Callable[[Any], Any]) -> Any:
    """An output with `inner` of all that it consists of."""
    if isinstance(output, ModelOutput):
        return type(output)(**{name: inner(value) for name, value in output.items()})
    if type(output) in (tuple, list):
        return type(output)(map(inner, output))
    if type(output) is dict:
        return {name: inner(value) for name, value in output.items()}
    raise NotReplayable(f"the model returns a {type(output).__name__}")
