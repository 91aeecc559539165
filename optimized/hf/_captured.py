"""Decode steps of transformers models as CUDA graphs, without a compiler.

One forward pass of a large model for one token launches some thousand kernels, which takes the host longer than the GPU
takes to run them. Within `captured`, the model's forward method captures the pass in a graph, once for each cache and
each set of shapes, and launches the graph from then on. It does so only if the pass would do the same without a graph,
except for the contents of tensors. Otherwise the pass runs as without `captured`.
"""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...reference.contract.arguments import capturing
from ...reference.contract.interruption import last_change
from ...reference.hf.cache_adapter import NAMES, REPLAYED, StateCache
from .._common import graph
from .._common.state import Changeable
from ._host import NotReplayable, parts
from ._model import Model
from ._step import Step, arguments_of, no_padding, phase_of

#: Devices that have graphs.
DEVICES = ("cuda",)
#: Kinds of steps of a cache that are counted. With more, the arguments change from step to step.
KINDS = 16

_NAME = "_kvtwin_captured"
#: Methods of a model that are others within `captured`.
_SHADOWED = ("forward", "get_compiled_call")
#: One capture or replay at a time, of all models.
_lock = RLock()
#: The stream of the last replay on each device.
_last: dict[torch.device, Any] = {}


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """The streams of all captures on a device: cuBLAS keeps memory for each stream for ever, and graphs contain it."""
    return graph.two_streams(device)


def _follow(device: torch.device) -> None:
    """Graphs share memory: each waits for the one before, which may have been on another stream."""
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        if _last.setdefault(device, current) != current:
            current.wait_stream(_last[device])
            _last[device] = current


@contextmanager
def captured(model: PreTrainedModel) -> Iterator[Captured]:
    """Within this context, decode steps with an optimized cache are replays of CUDA graphs.

        with captured(model) as steps:
            cache = LongFlowCache(model.config, budget=1024)
            model.generate(ids, **cache.argument)

    model: a transformers model whose attention is "kvtwin", on one CUDA device, in evaluation mode. A forward pass of
    one token per row is captured when a pass of its kind has run once before: with the same cache, batch size, and
    other arguments. Prompts run as usual. The results are those without `captured`, with the same bits.

    A graph belongs to its cache. It is used again after `reset()`, for any number of prompts of one batch size, so keep
    the cache for the next call of `generate`. A new cache needs graphs of its own, and those of a cache that is deleted
    are freed. Weights may change in place. Whatever else would make a graph wrong, such as other weights, adapters or
    hooks, or caches whose layers get buffers of another size, leads to a new graph, or to passes without one. The first
    of these for each cause gives a UserWarning that names it, and `reasons` lists them.

    Yields a `Captured`, which counts steps, seconds and bytes. All graphs are freed at the end of the context. Models
    can be captured one inside of the other, but RuntimeError for a model that is captured already. TypeError unless
    `model` is a transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    if _NAME in vars(model.forward):
        raise RuntimeError("captured(model) is active already: the model's decode steps are captured once")
    steps, own = Captured(model), {name: vars(model)[name] for name in _SHADOWED if name in vars(model)}

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return steps._forward(args, kwargs)

    setattr(forward, _NAME, steps)
    model.forward = forward
    model.get_compiled_call = lambda compile_config=None: model.__call__    # generate compiles nothing
    try:
        yield steps
    finally:
        for name in _SHADOWED:
            delattr(model, name)
        vars(model).update(own)
        steps._free()


class OfCache:
    """The graphs of a cache, by the kinds of its steps. None: such a step has run, without a graph."""

    def __init__(self) -> None:
        self.steps: dict[Hashable, Step | None] = {}
        self.failed: set[Hashable] = set()
        self.seen = -1                              # tokens after the last step, if that was a replay
        self.row_changes = 0                        # of the cache, when it was looked at
        self._phase: Hashable = None                # of the step after it, by all changes until this one
        self._change: object = None

    def replayed(self, cache: StateCache, seen: int) -> None:
        """A replay is under way, after which the cache has seen so many tokens. Prepares the next step meanwhile."""
        self.seen, self._change = seen, last_change()
        try:
            self._phase = phase_of(cache, seen)
        except NotReplayable:                       # the next step says so
            self._change = None

    def phase(self, cache: StateCache, seen: int) -> Hashable:
        """As `phase_of`, which takes longer."""
        layers = cache.layers
        counted = [getattr(layer, "_seen", None) for layer in layers].count(seen)      # passes that were interrupted
        same = self.seen == seen and self._change is last_change() and counted == len(layers)
        return self._phase if same else phase_of(cache, seen)


class Captured:
    """What has become of the decode steps of a model within `captured`.

    replays: the number of steps that were replays. eager: that of steps without a graph, among them those that come
    before a capture. graphs: the number of graphs. seconds: the time of all captures. memory_bytes: the GPU memory that
    captures have taken, as PyTorch reserves it, and static inputs; 0 at the end of the context. reasons: why other
    steps than the first of a kind had no graph.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.replays = self.eager = 0
        self.seconds, self.memory_bytes = 0.0, 0
        self.reasons: list[str] = []
        self._model, self._plain = model, model.forward
        self._signature = inspect.signature(self._plain)
        self._caches: WeakKeyDictionary[StateCache, OfCache] = WeakKeyDictionary()
        self._known: Model | None = None
        self._unfit = ""
        self._pool: graph.Pool | None = None

    @property
    def graphs(self) -> int:
        """The number of graphs."""
        return sum(step is not None for kept in self._caches.values() for step in kept.steps.values())

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward pass."""
        if torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        given = {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs} if args else kwargs
        cache = next((given[name] for name in NAMES if given.get(name) is not None), None)
        if not isinstance(cache, StateCache) or not _is_one_token(given) or not (seen := cache.get_seq_length()):
            if isinstance(cache, StateCache):
                self._forget_last(cache)
            else:
                self._other_cache(cache, given)
            return self._plain(*args, **kwargs)
        with _lock:
            output = self._by_graph(cache, given, seen)
            if output is not None:
                self.replays += 1
                return output
        self.eager += 1
        self._forget_last(cache)
        return self._plain(*args, **kwargs)

    def _other_cache(self, cache: object, given: dict[str, Any]) -> None:
        if cache is not None and _is_one_token(given):
            self._refuse(f"a {type(cache).__name__} is no cache of kvtwin.optimized.hf")

    def _forget_last(self, cache: StateCache) -> None:
        """The next replay must look at everything again: a pass without a graph may change anything."""
        if cache in self._caches:
            self._caches[cache].seen = -1

    def _refuse(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"captured: decode steps run without a CUDA graph: {reason}", stacklevel=6)

    def _by_graph(self, cache: StateCache, given: dict[str, Any], seen: int) -> Any:
        """The output of a decode step by a graph, or None if it must run without."""
        kept = self._caches.get(cache)
        if kept is None:
            kept = self._caches.setdefault(cache, OfCache())
            REPLAYED.add(cache)
        try:
            phase = kept.phase(cache, seen)
            if phase is None:
                return None
            device = cache.layers[0].device
            self._check_surroundings(device)
            mask = given.get("attention_mask")
            given, of_arguments = arguments_of(given, self._signature, seen, device)
            tokens = no_padding(cache.layers[0], mask, given["position_ids"], seen)
            kind = phase, of_arguments
            same = kept.seen == seen and kept.row_changes == cache.row_changes
            if not same or self._known is None or not self._known.unchanged():
                self._look_again(cache, kept)
            if not tokens:                      # asked last: until here, the device may have been at work on the answer
                raise NotReplayable("attention_mask says that a new token is padding")
            return self._step(cache, kept, kind, given, seen)
        except NotReplayable as error:
            self._refuse(str(error))
            return None

    def _check_surroundings(self, device: torch.device) -> None:
        """NotReplayable where no graph can be captured or launched."""
        if device.type not in DEVICES:
            raise NotReplayable(f"the model is on {device}, and only a CUDA device has graphs")
        if capturing(device):
            raise NotReplayable("another graph is being captured, which gets the kernels of this step instead")
        if torch.is_grad_enabled():
            raise NotReplayable("gradients are enabled: call the model under torch.no_grad()")
        if torch.is_autocast_enabled(device.type):
            raise NotReplayable("autocast is enabled: load the model with the dtype of its computation instead")

    def _look_again(self, cache: StateCache, kept: OfCache) -> None:
        """Drop graphs that are not right any more. NotReplayable if the model can have none."""
        now = Model(self._model)
        if self._known is None or not now.is_like(self._known):
            for others in self._caches.values():
                others.steps.clear()
                others.failed.clear()
            self._known = now
            self._unfit = now.unfit(cache.layers[0].device)
        if self._unfit:
            raise NotReplayable(self._unfit)
        if kept.row_changes != cache.row_changes:       # the kernels of other states may not be compiled yet
            kept.steps.clear()
            kept.failed.clear()
            kept.row_changes = cache.row_changes
        found = parts(cache)
        for kind, step in list(kept.steps.items()):
            if step is not None and not step.fits(found):
                del kept.steps[kind]

    def _step(self, cache: StateCache, kept: OfCache, kind: Hashable, given: dict[str, Any], seen: int) -> Any:
        """Replay a step of this kind, or capture it first. None if there is no graph."""
        step, device = kept.steps.get(kind), cache.layers[0].device
        if step is None and not self._may_capture(cache, kept, kind):
            return None
        with _on(device):
            step = step or self._capture(cache, kept, kind, given)
            _follow(device)
            output = step.replay(given, cache)
        kept.replayed(cache, seen + 1)
        return output

    def _may_capture(self, cache: StateCache, kept: OfCache, kind: Hashable) -> bool:
        """Whether a step of this kind has run once, and no capture has failed."""
        if kind in kept.failed:
            return False
        if kind not in kept.steps:
            if list(kept.steps.values()).count(None) >= KINDS:
                kept.steps = {known: step for known, step in kept.steps.items() if step is not None}
                raise NotReplayable("its arguments change from step to step")
            kept.steps[kind] = None
            for part in parts(cache):
                if isinstance(part, Changeable):
                    part._expect_replays()              # the step that now follows compiles all kernels
            return False
        return True

    def _capture(self, cache: StateCache, kept: OfCache, kind: Hashable, given: dict[str, Any]) -> Step:
        """Capture a step. NotReplayable if this fails."""
        device, start = cache.layers[0].device, time.perf_counter()
        before = _reserved(device)
        if self._pool is None:
            self._pool = graph.Pool(device, _streams(device))
        try:
            self._pool.keep_pool()
            step = Step(self._plain, cache, given, self._pool)
        except Exception as error:
            kept.failed.add(kind)
            del kept.steps[kind]
            said = str(error).strip().partition("\n")[0]
            raise NotReplayable(f"the capture failed: {said}") from error
        kept.steps[kind] = step
        self.seconds += time.perf_counter() - start
        self.memory_bytes += max(0, _reserved(device) - before)
        return step

    def _free(self) -> None:
        """Free all graphs."""
        with _lock:
            had = self._pool is not None and self._pool.pool is not None
            REPLAYED.difference_update(self._caches)
            self._caches.clear()
            self._pool = self._known = None
            self.memory_bytes = 0
            if had:
                torch.cuda.empty_cache()        # memory of a pool without graphs goes back to the device only by this


def _is_one_token(given: dict[str, Any]) -> bool:
    """Whether the arguments of a forward pass have one token per row."""
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    return isinstance(tokens, Tensor) and tokens.dim() > 1 and tokens.shape[1] == 1


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

