"""Lockstep: feed the same tokens to the state under test and to a float64 reference state, and compare after each step.

After the prompt and after every step, outputs and scores must be within their bounds; occupied, positions and every
counter must be equal; keys and values of occupied slots must be bitwise equal; the next choice is checked against
intervals of scores. A choice that differs within its bounds is an adjudicated tie, and the reference adopts it: the
slot is written to reference.next_slot, or, after a prompt, the reference's slots are filled again with the tokens that
the state under test kept. So the rest of the trace stays comparable after a legal tie.

With the convention slot_order = "any", slots are compared by the tokens in them (slot_order.py), and any of equal
tokens may be evicted, since the lowest slot among them is another one.

An adapter adds what is specific to a method: `Adapter` here, or the one in judge/checkers/<method>.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import capabilities, stats
from ..cases import paged_states
from ..cases.case import DecodeCase
from ..cases.oracle import upcast, upcast_all
from ..cases.state_trace import StateTrace
from . import bounds, checkers, host
from .choices import Verdict
from .compare import Mismatch, assert_dtype, assert_same, assert_within, fail, gathered
from .fields import field
from .lacking import Lacking
from .slot_order import InOrder
from .unchanged import also, unchanged


@dataclass
class Summary:
    """Counts of a run: compared steps, decisive choices, adopted choices, and choices with more than one answer."""

    steps: int = 0
    decisive: int = 0
    adjudicated: int = 0
    undecided: int = 0

    def add(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self.decisive += int(verdict.decisive.sum())
            self.adjudicated += int(verdict.adjudicated.sum())
            self.undecided += int((verdict.scored & ~verdict.decisive).sum())

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.decisive} decisive choices, {self.adjudicated} adjudicated ties"


class Adapter:
    """Method-specific checks of lockstep. This class fits a state that stores keys and values unchanged, and attends to
    the whole prompt and to the slots that are occupied after a step. Methods override the rest.

    `tested` and `reference` are the two states; tensors of `prompt` and `token` are the inputs of `tested`.
    """

    #: Attributes [B, Hkv, S, ...] that must be equal in every occupied slot.
    stored: tuple[str, ...] = ("key", "value")
    #: Attributes besides occupied, positions and tokens_seen that must be equal once choices have been checked.
    exact: tuple[str, ...] = ()
    #: True if the checks hold for slots in any order, read through `slot_order.InOrder`.
    any_slot_order = False

    def attach(self, tested: Any, reference: Any) -> None:
        """Called once, before either state gets a token."""

    def contents(self, state: Any) -> dict[str, Tensor]:
        """The attributes `stored` of one of the two states, by name."""
        return {name: getattr(state, name) for name in self.stored}

    def prefill(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Feed both states the prompt: query, key, value, and occupied unless all tokens are valid. Returns the output
        under test, the truth, and the error bound."""
        more = also(checkers.extras(tested, prompt["query"], prompt["key"], prompt["value"]))
        output = tested.prefill(**prompt, **more)
        truth = reference.prefill(**upcast_all(prompt), **upcast_all(more))
        query, key, value, occupied = (whole(prompt)[name] for name in ("query", "key", "value", "occupied"))
        bound = bounds.causal_output(
            query, key, value, occupied, scale=scale_of(reference), **changes_of(reference)
        )
        return output, truth, bound

    def append_block(self, tested: Any, reference: Any, block: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Like `prefill`, for states that have `append_block`."""
        raise NotImplementedError(f"the adapter of {type(tested).__name__} does not support append_block")

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        """Check the choices after a prompt (or block), and make the reference adopt legal differences. Called before
        slots are compared. prompt: always contains `occupied`."""

    def before_slots(self, tested: Any, reference: Any, token: dict[str, Tensor]) -> Verdict | None:
        """Check what a step evicted by its own scores, and make the reference adopt it. Not needed if a step evicts the
        slot that `next_slot` named before the step."""

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        """Check scores and the next choice, and adopt it. Returns the output's bound [B, Hq, D] and the verdict."""
        case = DecodeCase.of(
            query, tested.key, tested.value, reference.occupied,
            scale=scale_of(reference), per_head=reference.occupied.dim() == 3,
        )
        return bounds.decode_output(case), None

    def reorder(self, index: Tensor) -> None:
        """Called after both states were reordered."""

    def reset(self) -> None:
        """Called after both states were reset."""


def whole(prompt: dict[str, Tensor]) -> dict[str, Tensor]:
    """A prompt's tensors with `occupied`, all True if it was not given."""
    batch, _, tokens, _ = prompt["key"].shape
    return {"occupied": torch.ones(batch, tokens, dtype=torch.bool, device=prompt["key"].device), **prompt}


def scale_of(state: Any) -> float | None:
    """The scale of query . key in a state's config; None: the default."""
    return getattr(state.config, "scale", None)


def changes_of(state: Any) -> dict[str, Any]:
    """The keyword arguments of `oracle.attend` for a state's softcap and sinks."""
    return {
        "softcap": getattr(state.config, "softcap", None), "sink_logits": getattr(state, "sink_logits", None),
    }


class Lockstep:
    """Drives two states together. `reference` is the reference module's state; it gets float64 copies of the inputs."""

    def __init__(self, tested: Any, reference: Any, adapter: Adapter) -> None:
        self.conventions = capabilities.current()
        if self.conventions.slot_order == "any" and adapter.any_slot_order:
            self.conventions = replace(self.conventions, ties="any")
            tested = InOrder(tested, reference)
        self.tested, self.reference, self.adapter = tested, reference, adapter
        self.summary = Summary()
        adapter.attach(tested, reference)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Feed both states the prompt [B, H, T, D] and compare them. Returns the output under test."""
        with capabilities.use(self.conventions):
            return self._feed("prefill", "prompt", query, key, value, occupied)

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Like `prefill`, at any time, for states that have `append_block`."""
        with capabilities.use(self.conventions):
            return self._feed("append_block", "block", query, key, value, occupied)

    def _feed(
        self, method: str, what: str, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None
    ) -> Tensor:
        tokens = {"query": query, "key": key, "value": value}
        if occupied is not None:
            tokens["occupied"] = occupied
        with unchanged(tokens, f"after {method} (an argument)"):
            output, truth, bound = getattr(self.adapter, method)(self.tested, self.reference, tokens)
        with field("output"):
            assert_dtype(output, query.dtype, what="output")
            assert_within(output, truth, bound, what=f"{method}'s output")
        self.summary.add(self.adapter.after_prompt(self.tested, self.reference, whole(tokens)))
        self.compare(f"after the {what}")
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Feed both states one token and compare them. Returns the output under test."""
        with capabilities.use(self.conventions):
            return self._step(query, key, value)

    def _step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        stats.at_step(self.summary.steps)
        when = f"at step {self.summary.steps}"
        more = checkers.extras(self.tested, query, key, value)
        with unchanged({"query": query, "key": key, "value": value, **more}, "after a step (an argument)"):
            output = self.tested.step(query, key, value, **more)
        truth = self.reference.step(upcast(query), upcast(key), upcast(value), **upcast_all(more))
        self.summary.add(
            self.adapter.before_slots(self.tested, self.reference, {"query": query, "key": key, "value": value})
        )
        # Compare slots first: a misplaced token also changes the output, and the slot is the cause.
        self.compare(when, choice=False)
        bound, verdict = self.adapter.after_step(self.tested, self.reference, query)
        with field("output"):
            assert_dtype(output, query.dtype, what="output")
            assert_within(output, truth, bound, what=f"output {when}")
        self.summary.add(verdict)
        self.summary.steps += 1
        self.compare(when, stored=False)  # stored tensors have been compared, and `after_step` changes none
        return output

    def compare(self, when: str, *, choice: bool = True, stored: bool = True) -> None:
        """Compare everything that must be equal. choice=False skips what the adapter checks later; stored=False skips
        keys, values and what else each slot stores."""
        try:
            self._compare(when, choice, stored)
        except Mismatch as error:
            error.of_state = True
            raise

    def _compare(self, when: str, choice: bool, stored: bool) -> None:
        tested, reference = self.tested, self.reference
        if tested.tokens_seen != reference.tokens_seen:
            fail(f"tokens_seen {when}: expected {reference.tokens_seen}, got {tested.tokens_seen}")
        assert_same(tested.occupied, reference.occupied, what=f"occupied {when}")
        assert_same(tested.positions, reference.positions, what=f"positions {when}")
        occupied = reference.occupied if reference.occupied.dim() == 3 else reference.occupied[:, None]
        if stored:
            expected = self.adapter.contents(reference)
            for name, one in self.adapter.contents(tested).items():
                where = occupied.view(*occupied.shape, *[1] * (one.dim() - occupied.dim()))
                assert_same(one, expected[name], where=where, what=f"{name} {when}")
        for name in self.adapter.exact if choice else ():
            assert_same(getattr(tested, name), getattr(reference, name), what=f"{name} {when}")

    def reset(self) -> None:
        self.tested.reset()
        self.reference.reset()
        self.adapter.reset()
        self.compare("after reset")

    def reorder(self, index: Tensor) -> None:
        rows = {name: tensor.index_select(0, index) for name, tensor in self._rows().items()}
        with unchanged({"index": index}, "after reorder (an argument)"):
            self.tested.reorder(index)
        self.reference.reorder(index)
        self.adapter.reorder(index)
        self.compare("after reorder")
        for name, tensor in self._rows().items():
            assert_same(tensor, rows[name], what=f"{name} after reorder")

    def _rows(self) -> dict[str, Tensor]:
        """Copies of the tested state's public tensors with a row per sequence. `compare` compares stored ones."""
        batch = self.reference.sizes.batch
        public = {name for name in dir(self.reference) if not name.startswith("_")}
        # A state may have to dequantize keys and values; sinks are of heads.
        public -= {"key", "value", "sink_logits", *self.adapter.stored}
        names = [name for name in sorted(public) if _is_rows(self.reference, name, batch)]
        found = {name: getattr(self.tested, name, None) for name in names}
        return {name: tensor.clone() for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _is_rows(state: Any, name: str, batch: int) -> bool:
    tensor = getattr(state, name)
    return isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.shape[0] == batch


def adopt_prompt(reference: Any, kept: Tensor, key: Tensor, value: Tensor) -> None:
    """Refill the reference's slots: slot i of row b gets prompt token kept[b, i] [B, N]; -1: nothing."""
    count, slots = kept.shape[1], reference.occupied.shape[-1]
    reference.key[:, :, :count] = gathered(upcast(key), kept)
    reference.value[:, :, :count] = gathered(upcast(value), kept)
    wide = kept[:, None] if reference.positions.dim() == 3 else kept
    reference.positions[..., :count] = wide
    reference.occupied[..., :count] = wide >= 0
    index = torch.arange(slots, device=kept.device)
    reference.next_slot = index.where(~reference.occupied, slots).amin(-1)


def pair(
    method: str, tested: ModuleType, reference: ModuleType | None = None, *, config: dict[str, Any],
    on_host: bool = False, **sizes: Any,
) -> Lockstep:
    """A lockstep of a method's states. tested, reference: the method's modules on both sides.

    config: keyword arguments of the method's *Config. sizes: batch, query_heads, key_value_heads, head_dim, dtype,
    device of the state under test. on_host: the lockstep takes tensors on the CPU, where the reference runs; those of
    `host.to_cpu` reach the state under test as they were.
    """
    found = checkers.pair(method)
    reference = reference or found.reference
    assert found.config is not None
    assert found.state is not None
    options, state = found.config(**config), found.state.__name__
    under_test, truth = getattr(tested, state)(options, **sizes), {**sizes, "dtype": torch.float64}
    if on_host:
        under_test, truth["device"] = host.OnHost(under_test, sizes["device"]), host.CPU
        truth |= {name: tensor.cpu() for name, tensor in sizes.items() if isinstance(tensor, Tensor)}
    adapter, oracle = checkers.ask(method, "Adapter", Adapter)(), getattr(reference, state)(options, **truth)
    if getattr(tested, "of_others", False):  # kvtwin's own states lack nothing
        under_test = Lacking(under_test, oracle)
    return Lockstep(under_test, oracle, adapter)


class Layers:
    """Locksteps of several layers that decide together: each layer gets the prompt in its turn, then every token.

    A prompt may change the layers before it, which are compared again. shared: what the states of each side have in
    common, if that is reordered and reset by itself.
    """

    def __init__(self, layers: list[Lockstep], shared: tuple[Any, ...] = ()) -> None:
        self.layers, self.shared = layers, shared

    @property
    def summary(self) -> Summary:
        """The counts of all layers."""
        return Summary(*(sum(counts) for counts in zip(*(astuple(one.summary) for one in self.layers), strict=True)))

    def prefill(self, prompts: list[dict[str, Tensor]], order: Tensor | None = None) -> None:
        """Feed each layer its prompt. order: reorder all rows by it, once the first layer has its prompt."""
        for number, prompt in enumerate(prompts):
            with self._layer(number):
                if number and order is not None:
                    prompt = {name: one if one is None else one.index_select(0, order) for name, one in prompt.items()}
                self.layers[number].prefill(**prompt)
            if not number and order is not None:
                self.reorder(order)
            for earlier in range(number):
                with self._layer(earlier):
                    self.layers[earlier].compare(f"after the prompt of layer {number}")

    def take_and_reset(self, prompts: list[dict[str, Tensor]]) -> None:
        """Feed the states under test a prompt that is not judged, since it may overflow, and reset them."""
        for layer, prompt in zip(self.layers, prompts, strict=True):
            more = checkers.extras(layer.tested, prompt["query"], prompt["key"], prompt["value"])
            layer.tested.prefill(**prompt, **more)
        self.reset()

    def step(self, tokens: list[dict[str, Tensor]]) -> None:
        """Feed each layer one token."""
        for number, token in enumerate(tokens):
            with self._layer(number):
                self.layers[number].step(**token)

    def reset(self, *, shared: bool = True) -> None:
        """Reset the states, and what they share unless `shared` is False."""
        for each in (*(self.shared if shared else ()), *self.layers):
            each.reset()

    def reorder(self, index: Tensor) -> None:
        for each in (*self.shared, *self.layers):
            each.reorder(index)

    @contextmanager
    def _layer(self, number: int) -> Iterator[None]:
        """Name the layer in the message of a mismatch."""
        try:
            yield
        except Mismatch as error:
            if len(self.layers) > 1:
                error.args = (f"layer {number} of {len(self.layers)}: {error.args[0]}", *error.args[1:])
            raise


def layers_of(
    method: str, tested: ModuleType, reference: ModuleType | None = None, *, config: dict[str, Any], layers: int,
    on_host: bool = False, **sizes: Any,
) -> Layers:
    """Locksteps of the states of `layers` layers. Arguments as for `pair`; for several layers, the method's checker has
    `together`."""
    if layers == 1:
        return Layers([pair(method, tested, reference, config=config, on_host=on_host, **sizes)])
    found = checkers.pair(method)
    assert found.config is not None
    made = checkers.ask(method, "together", None)
    options, truth = found.config(**config), {**sizes, "dtype": torch.float64}
    under_test, ours = made(tested, options, layers=layers, **sizes)
    if on_host:
        under_test = [host.OnHost(state, sizes["device"]) for state in under_test]
        ours, truth["device"] = host.OnHost(ours, sizes["device"]), host.CPU
    exact, theirs = made(reference or found.reference, options, layers=layers, **truth)
    adapter = checkers.ask(method, "Adapter", Adapter)
    return Layers([Lockstep(*both, adapter()) for both in zip(under_test, exact, strict=True)], (ours, theirs))


def run(trace: StateTrace, tested: ModuleType, reference: ModuleType | None = None) -> Summary:
    """Run a drawn trace on both sides. `tested` is the method's module of the implementation under test."""
    on_host = host.judges(trace)
    if trace.pages:
        tested = paged_states.in_strided_pages(tested, checkers.state_name(trace.method), trace.pages)
    both = layers_of(
        trace.method, tested, reference, config=trace.options, layers=trace.layers, on_host=on_host, **trace.sizes
    )
    here = host.to_cpu if on_host else lambda value: value
    layers, turns, step = range(trace.layers), dict(trace.turns), 0
    if trace.after_reset:
        both.take_and_reset([here(trace.before_reset(layer)) for layer in layers])
    if trace.prompt:
        prompts = [here(trace.prompt_of(layer)) for layer in layers]
        if trace.twice:
            both.prefill(prompts, here(trace.order))
            both.reset(shared=False)
        both.prefill(prompts)
    while step < trace.steps:
        if step == trace.reset_at:
            both.reset()
        if step == trace.reorder_at:
            both.reorder(here(trace.order))
        if step in turns:
            both.layers[0].append_block(**here(trace.turn_inputs(step, turns[step])))
        else:
            both.step([here(trace.step_inputs(step, layer)) for layer in layers])
        step += turns.get(step, 1)
    for state in tested.made if trace.pages else ():
        paged_states.assert_only_own_slots_were_written(state.pages, state.config.budget + 1)
    return both.summary
