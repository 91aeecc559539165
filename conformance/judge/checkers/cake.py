"""Checker of CAKE: what a prompt's window observes, budgets as outputs, and the tokens that layers keep, given these.

The reference adopts the budgets and the kept tokens of the state under test, once they are judged. The states of
several layers share a cascade, so the prompt of one layer changes those before it: the adapter of each layer judges the
evictions of its own, whenever they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ....reference.baselines.cake_prompt import budgets, divide
from ....reference.selection import order
from ...cases import budget_cases, draws, tiny
from ...cases.budget_cases import LayerBudgetsCase
from ...cases.case import Case, DecodeCase, WindowCase
from ...cases.strategies import WINDOW_LAYOUTS, window_cases
from .. import bounds, lockstep, recorded
from ..bounds import Interval
from ..budgets import assert_budgets_right
from ..choices import Verdict, assert_kept_right
from ..compare import assert_dtype, assert_same, assert_within, fail
from ..fields import field
from ..subjects import Subject, properties
from ..ties import tie_classes, window_ties
from ..variants import ONE, variant
from .cake_bounds import Observed, observation_intervals, step_error
from .epikv import assert_inside

CASES = (WindowCase, LayerBudgetsCase)
SCORED = False
LAYERS = (2, 1, 3, 4)
SMALL: dict[str, Any] = {"window": 1, "kernel_size": 3}
#: cake/cake_cache.py and cake/model/modify_llama.py; tau of the models that the authors' tables do not name.
DEFAULTS = {
    "window": 32, "kernel_size": 5, "gamma": 200.0, "tau1": 1.0, "tau2": 1.0, "whole_batch": False, "scale": None,
}
SAME = ("kernel_size", "gamma", "tau1", "tau2", "whole_batch")
GROUPINGS = ({"kernel_size": 1}, {"kernel_size": 7})


VARIANTS = (
    *(variant(f"layers-{layers}", {"window": 3, "kernel_size": 5, "tau2": tau}, layers=layers, budget=9, prompt=24)
      for layers, tau in ((2, 1.0), (3, 0.02))),
    variant("prompts-in-other-rows-and-again", {"window": 3}, layers=3, budget=9, prompt=24, padding="stairs",
            twice=True, reorder_at=-1, steps=2),
    variant("pool-at-the-window", {"window": 3, "kernel_size": 7, "gamma": 0.0}, budget=14, prompt=12, steps=16,
            long=False),
    variant("pool-at-a-full-window", {"window": 4, "kernel_size": 5}, budget=12, prompt=14, padding="random", steps=9),
    # After so many steps, tokens that were in the window's second tile have left it.
    variant("window-of-several-tiles", {"window": 20, "kernel_size": 1}, **ONE, budget=24, prompt=30, steps=30),
    variant("whole-batch", {"whole_batch": True, "window": 2, "tau1": 0.4}, layers=2, prompt=18, padding="none"),
)


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package. A pool over the whole prefix would give all its tokens one score, with nothing to decide."""
    budget = max(2, draw(draws.budgets(max(2, most))))
    return {
        "budget": budget, "window": draw(draws.protected(budget - 1, min(window, budget - 1))),
        "kernel_size": draw(st.sampled_from((3, 1, 5) if budget > 5 else (1, 3))),
        "gamma": draw(st.sampled_from((200.0, 5.0, 0.0))),
        # A small temperature gives nearly all tokens to one layer, so that the cap binds.
        "tau1": draw(st.sampled_from((1.0, 1.6, 0.4))), "tau2": draw(st.sampled_from((1.0, 0.4, 2.0, 0.02))),
        "whole_batch": draw(st.sampled_from((False, False, True))),
    }


def max_kept(state: Any, tokens: int) -> int:
    """A short prompt stays whole until the first step."""
    return state.config.budget + state.config.window


# `observe` -----------------------------------------------------------------------------------------------------------


def gamma_of(case: WindowCase) -> float:
    """The weight of the variance with which a case is observed."""
    return (200.0, 5.0, 0.0)[case.tokens % 3]


def observe_inputs(case: WindowCase) -> dict[str, Any]:
    return {**case.score_inputs, "gamma": gamma_of(case)}


def assert_observe_right(actual: Any, case: WindowCase) -> None:
    """actual: `cake.observe(**observe_inputs(case))`."""
    found = observation_intervals(
        case.query_window, case.key, case.mask, gamma=gamma_of(case), kernel_size=case.kernel_size, scale=case.scale
    )
    with field("score"):
        assert_dtype(actual.score, torch.float32, what="score")
        infinite = found.exact.score.isinf()
        error = (found.score.high - found.exact.score).masked_fill(infinite, 0)
        assert_within(actual.score, found.exact.score, error, what="score")
    for name, interval in (("dispersion", found.dispersion), ("shift", found.shift)):
        with field(name):
            value, exact = getattr(actual, name), getattr(found.exact, name)
            assert_dtype(value, torch.float32, what=name)
            assert_inside(value, interval, what=name)
            assert_within(value, exact, torch.maximum(interval.high - exact, exact - interval.low), what=name)


def assert_layer_budgets_right(actual: Tensor, case: LayerBudgetsCase) -> None:
    """actual: `cake.budgets(**case.inputs)`."""
    inputs, total = case.inputs, case.total
    reported = inputs["log_preferences"].nan_to_num(-torch.inf, torch.inf, -torch.inf)
    prefix = inputs["prefix"]
    with field("budgets"):
        assert_budgets_right(
            actual, reported, Interval(reported, reported), budgets(**inputs), total=total, most=prefix,
            rule=lambda wanted, row: divide(wanted, prefix[row].expand(len(wanted)), total),
            scored=torch.ones_like(prefix, dtype=torch.bool),
        )


OBSERVE_PROPERTIES = properties(
    tied=("identical", "equal_keys"), extreme=("overflow_88", "extreme_1e4", "all_below_104"), full="none",
    masked=("left_padding", "random", "one_token"), layout=WINDOW_LAYOUTS,
)
SUBJECTS = (
    Subject(
        "observe", partial(window_cases, protect=("none",)), assert_observe_right,
        numbers=("score", "dispersion", "shift"), properties=OBSERVE_PROPERTIES, inputs=observe_inputs, sized="tokens",
        recorded=recorded.windows,
    ),
    Subject(
        "budgets", budget_cases.layer_budgets_cases, assert_layer_budgets_right, choices=("budgets",), sized=None,
        properties=properties(
            ordinary=budget_cases.ORDINARY, extreme=budget_cases.EXTREME, layout=budget_cases.LAYOUTS
        ),
    ),
)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    if isinstance(case, LayerBudgetsCase):
        assert_layer_budgets_right(module.budgets(**case.inputs), case)
        yield "budgets: right"
        return
    assert isinstance(case, WindowCase)
    assert_observe_right(module.observe(**observe_inputs(case)), case)
    yield "observe: right"


# The state -----------------------------------------------------------------------------------------------------------


def together(module: Any, config: Any, *, layers: int, **sizes: Any) -> tuple[list[Any], Any]:
    """See the package."""
    cascade = module.CAKECascade(config, layers=layers, batch=sizes["batch"], device=sizes["device"])
    return [module.CAKEState(config, **sizes, cascade=cascade, layer=layer) for layer in range(layers)], cascade


class Adapter(lockstep.Adapter):
    """The lockstep adapter of one layer; the module's docstring describes its checks."""

    exact = ("budgets",)

    def __init__(self) -> None:
        self.found: Observed | None = None
        self.prompt_tie: Tensor | None = None
        self.query: Tensor | None = None
        self.verdicts: list[Verdict] = []
        self.bound: Tensor | None = None

    def attach(self, tested: Any, reference: Any) -> None:
        self.tested, self.reference, self.dtype = tested, reference, tested.key.dtype
        self.judges: dict[int, Adapter] = reference.cascade.__dict__.setdefault("judges", {})
        self.judges[reference.layer] = self
        if reference.layer == 0:
            reference.cascade._grant = partial(self._grant, reference.cascade._grant)
        for name, watched in (("_keep", self._keep), ("_evict_step", self._evict), ("step", self._step)):
            setattr(reference, name, partial(watched, getattr(reference, name)))

    # The prompt ------------------------------------------------------------------------------------------------------

    def prefill(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        config, inputs = reference.config, lockstep.whole(prompt)
        key, occupied = inputs["key"], inputs["occupied"]
        window = min(config.window, key.shape[2])
        self.found = observation_intervals(
            inputs["query"][:, :, key.shape[2] - window:], key, occupied, gamma=config.gamma,
            kernel_size=config.kernel_size, scale=reference.scale,
        )
        self.prompt_tie = window_ties(key, occupied, window, config.kernel_size, shared_heads=False)
        return super().prefill(tested, reference, prompt)

    def _grant(self, grant: Any, count: int, prefix: Tensor, short: Tensor) -> Tensor:
        """Judge the budgets of the layers so far, in place of the reference's cascade, which adopts them."""
        truth, cascade, config = grant(count, prefix, short), self.tested.cascade, self.reference.config
        ends = []
        for layer in range(count):
            found = self.judges[layer].found
            assert found is not None
            ends.append(found.log_preference(tau1=config.tau1, tau2=config.tau2, whole_batch=config.whole_batch))
        allowed = Interval(*(torch.stack(each, 1) for each in zip(*ends, strict=True)))
        for name in ("log_preferences", "budgets"):
            later, expected = (getattr(side.cascade, name)[:, count:] for side in (self.tested, self.reference))
            assert_same(later.to(expected.device), expected, what=f"{name} of later layers after layer {count - 1}")
        reported = cascade.log_preferences[:, :count].to(truth.device)
        assert_dtype(reported, torch.float64, what="log_preferences")
        assert_inside(reported, allowed, what=f"log_preferences after layer {count - 1}")
        total = config.prefix_budget * cascade.layers

        def rule(wanted: Tensor, row: int) -> Tensor:
            return divide(wanted, prefix[row].expand(len(wanted)), total)

        adopted: Tensor = cascade.budgets[:, :count].to(truth.device, copy=True)
        self.verdicts.append(assert_budgets_right(
            adopted, reported, allowed, truth, total=total, most=prefix, rule=rule, scored=~short,
            what=f"budgets after layer {count - 1}",
        ))
        return adopted

    def _keep(self, keep_slots: Any, keep: Tensor) -> None:
        """Judge what the prompt of this layer or of a later one leaves, given the budgets."""
        reference, found = self.reference, self.found
        assert found is not None and self.prompt_tie is not None
        place = reference.positions.clamp_min(0)
        scores = Interval(*(end.gather(-1, place) for end in found.score))
        names = self.prompt_tie.gather(-1, place)
        keep_slots(self._judged(keep, scores, names, what="tokens kept of the prompt"))

    def reorder(self, index: Tensor) -> None:
        if self.found is not None and self.prompt_tie is not None:
            found, self.prompt_tie = self.found, self.prompt_tie.index_select(0, index)
            score, dispersion, shift = (
                Interval(*(end.index_select(0, index) for end in interval))
                for interval in (found.score, found.dispersion, found.shift)
            )
            exact = type(found.exact)(*(part.index_select(0, index) for part in found.exact))
            self.found = Observed(score, dispersion, shift, exact)

    # A step ----------------------------------------------------------------------------------------------------------

    def _step(self, step: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.query = query
        output: Tensor = step(query, key, value)
        return output

    def _evict(self, evict: Any, keep: Tensor) -> None:
        """Judge what a step leaves, and compute the output's bound for the tokens that it attended to."""
        reference = self.reference
        assert self.query is not None
        case = DecodeCase.of(
            self.query.to(self.dtype), reference.key.to(self.dtype), reference.value.to(self.dtype),
            reference.occupied, scale=lockstep.scale_of(reference), per_head=True,
        )
        self.bound = bounds.decode_output(case)
        positions, score = reference.positions, reference._score
        window, held = score == torch.inf, reference.occupied
        place, size = order(positions), reference.config.kernel_size
        error = step_error(case.attention, window | ~held, place, score, size)
        # Equal keys within reach of the pool, in order of position, give equal scores.
        keys = tie_classes(case.key, torch.ones_like(case.key), held, per_head=True).masked_fill(window | ~held, -1)
        near = torch.empty_like(keys).scatter(-1, place, keys)
        near = functional.pad(near, (size // 2, size // 2), value=-1).unfold(-1, size, 1)
        near = near.gather(2, place[..., None].expand(*place.shape, size)).contiguous()
        names = tie_classes(near, torch.ones_like(near), held, per_head=True)
        scores = Interval(score - error, score + error)
        evict(self._judged(keep, scores, names, what=f"tokens kept after token {reference.tokens_seen - 1}"))

    def _judged(self, keep: Tensor, scores: Interval, names: Tensor, *, what: str) -> Tensor:
        """Judge which of the reference's tokens the tested state keeps, and return them, [B, Hkv, S] bool.

        keep: the reference's choice; scores: the intervals of the slots' tokens; names: equal for equal tokens.
        """
        positions = self.reference.positions
        held, window = positions >= 0, self.reference._score == torch.inf
        own = self.tested.positions.to(positions.device)
        chosen = held & (positions[..., :, None] == own[..., None, :]).any(-1)
        for count, why in (((own >= 0).sum(-1), "are of its own"), (keep.sum(-1), "are as many as its budget allows")):
            wrong = count != chosen.sum(-1)
            if bool(wrong.any()):
                at = tuple(wrong.nonzero()[0].tolist())
                fail(
                    f"{what}: layer {self.reference.layer}, row and head {at}: of the tokens {own[at].tolist()}, "
                    f"{int(chosen[at].sum())} were in the cache, while {int(count[at])} {why}"
                )
        by_age = positions.masked_fill(~held, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
        low, high, tie, mask, protected, kept, truth = (
            each.gather(-1, by_age) for each in (*scores, names, held, window, chosen, keep)
        )
        equal = mask[..., :, None] & mask[..., None, :] & (tie[..., :, None] == tie[..., None, :])
        index = torch.arange(tie.shape[-1], device=tie.device).expand(tie.shape)
        tie = torch.where(mask, index[..., None, :].where(equal, tie.shape[-1]).amin(-1), index)
        for row in range(len(keep)):
            if bool((kept[row] == mask[row]).all()):
                continue
            indices, expected = (each[row].nonzero()[:, 1].view(len(each[row]), -1) for each in (kept, truth))
            self.verdicts.append(assert_kept_right(
                indices, expected, Interval(low[row], high[row]), occupied=mask[row], protected=protected[row],
                window=0, tie=tie[row], what=f"{what} (by age; layer {self.reference.layer}, row {row})",
            ))
        return chosen

    def _verdict(self) -> Verdict:
        """The verdicts since the last call, of all layers of the cascade."""
        found = [verdict for judge in self.judges.values() for verdict in judge.verdicts]
        for judge in self.judges.values():
            judge.verdicts = []
        return Verdict(*(
            torch.cat([getattr(one, name).flatten().cpu() for one in found] or [torch.zeros(0, dtype=torch.bool)])
            for name in ("scored", "decisive", "adjudicated")
        ))

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        return self._verdict()

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        assert self.bound is not None
        return self.bound, self._verdict()


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    generator = torch.Generator().manual_seed(13)
    logarithms = torch.randn(tiny.BATCH, 3, generator=generator, dtype=torch.float64)
    return {
        "dispersion": torch.full((tiny.BATCH,), 2.5, device=device),
        "shift": torch.full((tiny.BATCH,), 0.1, device=device),
        "log_preferences": logarithms.to(device), "prefix": torch.full((tiny.BATCH,), 9, device=device), "total": 12,
    }
