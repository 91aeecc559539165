"""What the property tests call: the functions of every method that its checker lists, and every state.

Each property has cases of its own, which differ from ordinary ones in what the property is about and in nothing else:
those of *free slots* have free slots, and ordinary numbers in contiguous tensors. So a failure has one cause.
`attribution` uses the same table to find the cause of a failure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from .. import capabilities, discovery, stats
from ..cases import draws, failures, strategies, supported
from ..cases.case import Case
from ..cases.layouts import LAYOUTS
from ..cases.state_trace import StateTrace
from . import checkers, compare, fields, host, lockstep, pieces
from .fields import Apart
from .unchanged import unchanged

#: Contents with logits beyond the range of exp, or scores that vanish.
EXTREME = ("overflow_88", "many_87", "all_below_104", "extreme_1e4", "tiny_values", "all_zero_values", "zero_query")
#: Contents with tokens whose scores are equal in any arithmetic.
TIED = ("duplicates", "identical", "equal_keys")

#: What free slots hold, in turns.
POISONS = ("nan", "inf", "largest", "stale", "zero")
#: Batch, KV heads and group size of cases on the CPU.
SHAPES = ((1, 2, 3), (2, 1, 4), (1, 3, 2), (2, 2, 1))


class Results(dict[str, tuple[stats.Stats, dict[str, stats.Stats]]]):
    """What right cases recorded, by case: outside of their fields, and in each field."""

    def __repr__(self) -> str:
        """Short, since Hypothesis prints the arguments of a failing test, and warns of long ones."""
        return f"<{len(self)} results>"


#: The keyword arguments of a strategy, by property.
Properties = Mapping[str, Mapping[str, tuple[Any, ...]]]
#: The fields of a case by which a property's cases differ from ordinary ones.
DISTINCTIONS = {
    "ties": ("content",), "extreme_numbers": ("content",),
    "free_slots": ("occupancy", "padding", "poison", "evictions", "last_page"), "layouts": ("layout",),
    "independence": ("batch", "key_value_heads", "group"), "decisions": ("protect",),
}


def properties(
    *, ordinary: tuple[str, ...] = ("ordinary",), tied: tuple[str, ...] = (), extreme: tuple[str, ...] = (),
    mask: str = "occupancy", full: Any = "full", masked: tuple[Any, ...] = (), protect: tuple[str, ...] = (),
    layout: tuple[str, ...] = LAYOUTS, paged: bool = False,
) -> Properties:
    """The arguments of a strategy for each property of which it has cases.

    ordinary, tied, extreme: contents. mask: the strategy's argument for occupied slots; full: its value without free
    slots; masked: its other values. protect: the strategy's protections, "none" among them. paged: of cases in pages
    (cases/in_pages.py), whose last pages are full, and whose unused memory holds zeros, but in cases of free slots.
    """
    plain: dict[str, tuple[Any, ...]] = {"content": ordinary, "layout": ("contiguous",)}
    plain |= {mask: (full,)} if masked else {}
    plain |= {"protect": ("none",)} if protect else {}
    plain |= {"last_page": ("full",), "poison": ("zero",)} if paged else {}
    made = {"accuracy": plain, "independence": plain, "repeatability": plain}
    made["decisions"] = {**plain, "protect": protect} if protect else plain
    strided = tuple(name for name in layout if name != "contiguous")
    for name, argument, values in (
        ("ties", "content", tied), ("extreme_numbers", "content", extreme), ("free_slots", mask, masked),
        ("layouts", "layout", strided),
    ):
        if values:
            made[name] = {**plain, argument: values}
    if paged:
        made["free_slots"] = {**made["free_slots"], "last_page": ("partial",)}
    return made


@dataclass(frozen=True)
class Subject:
    """A function of a method.

    name: the function's. cases: its strategy, which takes the arguments of `properties`. inputs: the function's keyword
    arguments for a case, tensors by name; arguments: what the function gets of them, if that is another form. judge(
    result, case): checks every field, each inside `fields.field`. numbers: the fields that have error bounds; choices:
    those that are decisions. sized: the strategy's argument for a range of slots or tokens; None: it has no large
    cases. batched: the first axis of every input is the batch, but for scales of FP8 numbers, and for caches in pages,
    which the input `block_table` refers to. shapes: how many of SHAPES its cases of independence have. longest: the
    most slots that its truth can be computed for (judge/served.py); None: any.
    recorded(device): cases from the recorded traces. variant: distinguishes subjects of one function. also: the
    function, or one of its kind, has another subject, so that a quick run on a CPU needs only some of the properties.
    method: set by `every`.
    """

    name: str
    cases: Callable[..., st.SearchStrategy[Any]]
    judge: Callable[[Any, Any], Any]
    numbers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    properties: Properties = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] = lambda case: case.inputs
    arguments: Callable[[dict[str, Any]], dict[str, Any]] = lambda inputs: inputs
    sized: str | None = "slots"
    batched: bool = True
    shapes: int = len(SHAPES)
    longest: int | None = None
    recorded: Callable[[Any], Iterator[Any]] | None = None
    variant: str = ""
    also: bool = False
    method: str = ""

    def __str__(self) -> str:
        return f"{self.method}.{self.name}" + (f"[{self.variant}]" if self.variant else "")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis prints it among the arguments of a failing test."""
        printer.text(str(self))

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.numbers, *self.choices)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The declared dtypes in which the function is to be judged."""
        return capabilities.current().dtypes

    def draw(self, prop: str, **more: Any) -> st.SearchStrategy[Any]:
        """The cases of a property."""
        return self.cases(**{**self.properties[prop], **more})

    def draw_each(self, data: Any, prop: str) -> Iterator[Any]:
        """A case for each value by which the cases of a property differ: each layout, each mask, each content.

        With the profile gpu, which compiles a kernel for each, all but ties in the usual shape only. Accuracy and ties,
        which depend on the shapes of tiles, are judged in others as well.
        """
        plain = self.properties["accuracy"]
        for argument, values in self.properties[prop].items():
            for number, value in enumerate(values if values != plain.get(argument) else ()):
                with nullcontext() if prop == "ties" else draws.usual_shape():
                    case = data.draw(self.draw(prop, **{argument: (value,)}))
                if prop == "free_slots":
                    case = dataclasses.replace(case, poison=POISONS[number % len(POISONS)])
                yield case

    def draw_shapes(self, data: Any) -> Iterator[Any]:
        """Cases of several rows and heads, with groups that are no powers of two. On a GPU, where each group is
        compiled, they are drawn as they come."""
        for batch, heads, group in SHAPES[:self.shapes]:
            case = data.draw(self.draw("independence"))
            if case.device.startswith("cpu") and supported.shape(batch, heads, group):
                case = dataclasses.replace(case, batch=batch, key_value_heads=heads, group=group)
            yield case

    def module(self, side: Any) -> Any:
        """The method's module in `twins.optimized`."""
        return checkers.module(side, checkers.pair(self.method))

    def call(self, module: Any, case: Any) -> Any:
        """The result for a case. Raises unchanged.ChangedInput if the call changes the memory of its inputs."""
        inputs = self.inputs(case)
        with unchanged(inputs):
            return self.result(module, inputs)

    def result(self, module: Any, inputs: dict[str, Any]) -> Any:
        """What the function returns for the `inputs` of a case, or for others like them."""
        return getattr(module, self.name)(**self.arguments(inputs))

    def other(self, case: Any) -> Any:
        """A case with the same sizes and other contents."""
        return dataclasses.replace(case, seed=case.seed ^ 1)

    def verify(self, module: Any, case: Any) -> None:
        """Call the function, or run the state, and judge everything. Raises compare.Mismatch."""
        result = self.call(module, case)
        if not host.judges(case):
            for part, of_part in pieces.split(case, result) if self.batched else ((case, result),):
                self.judge(of_part, part)
            return
        try:
            self.judge(host.to_cpu(result), host.of_case(case))
        finally:
            case.used()  # rather than its copy

    def check(
        self, module: Any, case: Any, name: str, *, decides: bool = False, results: Results | None = None
    ) -> None:
        """The same for one field of the result, and record the case. Raises compare.Mismatch.

        decides: the test must judge enough decisions. Cases that scores hardly decide do not count then. results: what
        is known from judging other fields.
        """
        inner = stats.Stats()
        try:
            with stats.collect(inner), failures.judging(str(self)):
                self._check(module, case, name, inner, results)
        except compare.Mismatch as error:
            if not self._ends_early(error, name):
                raise
        finally:
            stats.include(
                inner, judged=self._judged(inner, name), choice=name in self.choices, decides=decides, case=case,
                subject=str(self),
            )

    def _check(self, module: Any, case: Any, name: str, inner: stats.Stats, results: Results | None) -> None:
        """Judge one field, and record in `inner`. A case in which everything is right runs once for all fields."""
        if results is None or case.content == "given":  # cases with tensors of their own may have equal descriptions
            with fields.only(name):
                self.verify(module, case)
            return
        key = f"{self} {case!r}"
        if key in results:
            shared, of_fields = results[key]
            inner.add(shared)
            inner.add(of_fields.get(name, stats.Stats()))
            return
        try:
            shared, found = self._run(module, case, name, inner)
        except BaseException:
            results.clear()  # the failure may depend on what ran before, and is to come again
            raise
        if not found.errors:
            results[key] = shared, found.counted

    def _run(self, module: Any, case: Any, name: str, inner: stats.Stats) -> tuple[stats.Stats, Apart]:
        """Judge all fields, and raise the first error of one of them. Returns what was recorded for each of them."""
        shared = stats.Stats()
        with fields.apart() as found:
            try:
                with stats.collect(shared):
                    self.verify(module, case)
            except compare.Mismatch:
                if name not in found.errors:  # otherwise its error came first
                    raise
            finally:
                inner.add(shared)
                inner.add(found.counted.get(name, stats.Stats()))
        if name in found.errors:
            raise found.errors[name]
        return shared, found

    def _judged(self, inner: stats.Stats, name: str) -> bool:
        """True if field `name` was compared."""
        return inner.asked if name in self.choices else inner.exact or inner.bound_utilisation is not None

    def _ends_early(self, error: compare.Mismatch, name: str) -> bool:
        """True if the error is not about field `name`, but the rest cannot be compared any more."""
        return False


@dataclass(frozen=True)
class StateSubject(Subject):
    """A method's state, in lockstep with the reference over a drawn trace.

    Every difference but those of outputs and scores belongs to its field "tokens", and ends the comparison. A state
    that decides nothing has no such field; its output stands for all.
    """

    def draw_each(self, data: Any, prop: str) -> Iterator[Any]:
        """With the profile quick, one of these cases: a state takes long, and test_lockstep.py draws all of them."""
        if draws.is_quick():
            yield data.draw(self.draw(prop))
        else:
            yield from super().draw_each(data, prop)

    def call(self, module: Any, case: StateTrace) -> Any:
        return lockstep.run(case, module)

    def verify(self, module: Any, case: StateTrace) -> None:
        self.call(module, case)

    def _judged(self, inner: stats.Stats, name: str) -> bool:
        return inner.asked if name in self.choices else inner.bound_utilisation is not None

    def _ends_early(self, error: compare.Mismatch, name: str) -> bool:
        return name in self.numbers and error.field is None and bool(self.choices)


def _state(found: discovery.Pair) -> StateSubject:
    assert found.state is not None
    scored = checkers.ask(found.name, "SCORED", True)
    return StateSubject(
        method=found.name, name=found.state.__name__, judge=lambda result, case: None, sized=None, shapes=2,
        # Short, but longer than most budgets: test_lockstep.py has long traces.
        cases=lambda **arguments: strategies.state_traces(
            found.name, max_budget=4, max_prompt=12, max_steps=3, **arguments
        ),
        numbers=("output", "score") if scored else ("output",),
        choices=("tokens",) if checkers.ask(found.name, "DECIDES", True) else (),
        properties=properties(
            tied=checkers.ask(found.name, "TIED", TIED), extreme=strategies.VANISHING, mask="padding", full="none",
            masked=("left_padding", "random", "empty_row"), layout=strategies.TRACE_LAYOUTS,
        ),
    )


def every() -> list[Subject]:
    """All subjects, method by method: functions, then the state."""
    found: list[Subject] = []
    for pair in discovery.methods():
        found += [dataclasses.replace(one, method=pair.name) for one in checkers.ask(pair.name, "SUBJECTS", ())]
        if pair.state is not None:
            found.append(_state(pair))
    return found


def check_each(cases: Iterable[Any], check: Callable[[Any], Any]) -> int:
    """Check every case but those that the implementation refuses; refuse the example, or the test, if it refuses all.
    Returns how many were checked."""
    from ..refusals import NotProvided

    checked: int = 0
    refusal: BaseException | None = None
    for case in cases:
        try:
            check(case)
        except (UnsatisfiedAssumption, NotProvided) as error:
            refusal = error
        else:
            checked += 1
    if refusal is not None and not checked:
        raise refusal
    return checked


def neutral(subject: Subject, case: Case, *kept: str) -> Case:
    """The case with ordinary numbers in contiguous tensors, without free slots, of one row and one head, or the fewest
    declared; with its own numbers if they are ordinary. kept: the properties whose distinctions stay."""
    plain: dict[str, Any] = {
        name: own if (own := getattr(case, name, None)) in values else values[0]
        for name, values in subject.properties["accuracy"].items()
    }
    heads, group = (min(supported.sizes(name, (1,))) for name in ("kv_heads", "groups"))
    plain |= {"batch": 1, "key_value_heads": heads, "group": group, "poison": "zero"}
    stay = {name for one in kept for name in DISTINCTIONS.get(one, ())}
    names = {one.name for one in dataclasses.fields(case)} - stay
    return dataclasses.replace(case, **{name: value for name, value in plain.items() if name in names})
