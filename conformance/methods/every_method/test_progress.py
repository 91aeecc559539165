"""`hf.progress.Progress` against a model of it: passes through layers of all kinds, one of which may be interrupted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the caches for transformers need it")

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtwin.reference.hf.progress import Progress

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]


class Counted:
    """A layer that counts tokens."""

    seen = 0

    def get_seq_length(self) -> int:
        return self.seen


class Evicting(Counted):
    """A layer whose tokens are pending between `update` and attention."""

    pending = 0


class Window(Counted, DynamicSlidingWindowLayer):
    def __init__(self) -> None:
        """A layer of type DynamicSlidingWindowLayer itself would need tensors: see `made`."""


class Subclass(Window):
    """A layer of transformers that holds something else than tokens, and counts otherwise."""

    def get_seq_length(self) -> int:
        return 7 * self.seen


KINDS = ("evicting", "window", "subclass", "other")


@dataclass(frozen=True)
class Plan:
    """kinds: of the layers. skipped: those that the model never calls. passes: the tokens of each. cut: the pass, layer
    and place (before `update` or before attention) at which one pass ends."""

    kinds: tuple[str, ...]
    skipped: frozenset[int]
    passes: tuple[int, ...]
    cut: tuple[int, int, str] | None


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    kinds = ("evicting", *draw(st.lists(st.sampled_from(KINDS), max_size=4)))
    kinds = tuple(draw(st.permutations(kinds)))
    layers = st.integers(0, len(kinds) - 1)
    skipped = frozenset(draw(st.sets(layers, max_size=2))) - {kinds.index("evicting")}
    passes = tuple(draw(st.lists(st.integers(1, 3), min_size=3, max_size=5)))
    called = [number for number in range(len(kinds)) if number not in skipped]
    cut = (draw(st.integers(0, 1)), draw(st.sampled_from(called)), draw(st.sampled_from(("update", "attention"))))
    return Plan(kinds, skipped, passes, draw(st.sampled_from((None, cut))))


def made(kind: str) -> Counted:
    return {"evicting": Evicting, "window": Window, "subclass": Subclass, "other": Counted}[kind]()


class Passes:
    """The layers of a model, and a Progress through them."""

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtwin.reference.hf.progress.DynamicSlidingWindowLayer", Window)
        self.layers = [made(kind) for kind in plan.kinds]
        self.called = [number for number in range(len(self.layers)) if number not in plan.skipped]
        self.progress = Progress(self.layers, PreTrainedConfig())

    def run(self, tokens: int, cut: tuple[int, str] | None = None) -> None:
        for number in self.called:
            layer = self.layers[number]
            self.progress.enter(number)
            if cut == (number, "update"):
                return
            layer.seen += tokens
            if isinstance(layer, Evicting):
                layer.pending = tokens
            if cut == (number, "attention"):
                return
            if isinstance(layer, Evicting):
                layer.pending = 0

    def whole(self) -> bool:
        """Whether all layers whose tokens count have the same ones, and none waits for attention."""
        counted = [
            self.layers[number] for number in self.called if type(self.layers[number]) in (Evicting, Window)
        ]
        pending = any(isinstance(layer, Evicting) and layer.pending for layer in self.layers)
        return not pending and len({layer.seen for layer in counted}) == 1

    def reset(self) -> None:
        for layer in self.layers:
            layer.seen = 0
            if isinstance(layer, Evicting):
                layer.pending = 0


@example(plan=Plan(("evicting", "evicting"), frozenset(), (1, 1, 1), (0, 1, "attention")))
@example(plan=Plan(("other", "window", "evicting"), frozenset(), (2, 1, 1), (1, 1, "attention")))
@given(plan=plans())
@settings(max_examples=max(150, settings().max_examples))
def test_a_pass_is_refused_while_the_layers_differ(plan):
    """After an interrupted pass each further one is refused, until a reset. Without one, none is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = Passes(plan, monkeypatch)
        for number, tokens in enumerate(plan.passes):
            if plan.cut is not None and number == plan.cut[0]:
                assert not refused(model, tokens, plan.cut[1:])
            elif model.whole():
                assert not refused(model, tokens), "a pass through layers that agree was refused"
            else:
                assert refused(model, tokens) and refused(model, tokens), "an interrupted pass went unnoticed"
        model.reset()
        for tokens in plan.passes:
            assert not refused(model, tokens), "a pass after a reset was refused"
        assert model.whole()


def refused(model: Passes, tokens: int, cut: tuple[int, str] | None = None) -> bool:
    try:
        model.run(tokens, cut)
    except RuntimeError as error:
        return "reset() on the cache" in str(error)
    return False
