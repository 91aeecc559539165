"""How much a test must judge: cases, decisions, dtypes."""

from __future__ import annotations

import pytest

from .. import capabilities, stats
from ..cases import draws
from ..judge.properties import CORE
from ..refusals import NotProvided
from . import verdict
from .results import FACTS

VACUOUS = (
    "vacuous: {decisive} of {total} decisions were decisive ({share:.0%}), expected at least half: this test would "
    "accept wrong evictions (draw data whose scores differ by more than their bounds)"
)
IDLE = (
    "vacuous: masks settled every decision in the cases that this test drew: it would accept any eviction (draw "
    "configs that leave something to decide)"
)
UNDECIDED = "too few decisions: {decisive} of {total} were decisive in the cases that it supports"

#: So many decisive decisions are enough at served sizes. The scores of 100,000 tokens lie closer than their bounds, so
#: that less than half of the decisions may be decisive; small cases have those.
ENOUGH_SERVED = 1000


def check_decided(
    counted: stats.Stats, implementation: str | None, least_decisions: int = 0, *, served: bool = False
) -> None:
    """Raise if a passed test compared too few decisive decisions: vacuous for our side, not provided for --kv-impl.

    least_decisions: what a verdict needs of a property's test, 0 of other tests. served: the sizes are.
    """
    if least_decisions and counted.asked and not counted.total and implementation is None:
        pytest.fail(IDLE, pytrace=False)
    if not counted.vacuous or (served and counted.decisive >= ENOUGH_SERVED):
        return
    if implementation is not None:
        raise NotProvided(UNDECIDED.format(decisive=counted.decisive, total=counted.total))
    share = counted.decisive / counted.total
    pytest.fail(VACUOUS.format(decisive=counted.decisive, total=counted.total, share=share), pytrace=False)


def least_of(item: pytest.Item, implementation: str | None) -> tuple[int, int]:
    """The least number of cases and of decisive decisions that a verdict needs of this test; 0 if it needs none.

    A quick run of kvtwin's own implementation needs the cases of core properties alone, without those of laws about
    free slots, which other tests judge as well."""
    judged = item.stash[FACTS]["judges"]
    if judged is None:
        return 0, 0
    cases, decisions = verdict.least(judged)
    judged_elsewhere = judged == "free_slots" and item.stash[FACTS]["kind"] == "laws"
    if implementation is None and (judged_elsewhere or judged not in CORE) and draws.is_quick():
        cases = 0
    return cases, decisions


def dtypes_of(item: pytest.Item, implementation: str | None) -> tuple[str, ...]:
    """The dtypes in which a verdict needs this test to judge somebody else's implementation."""
    if implementation is None or item.stash[FACTS]["judges"] not in CORE:
        return ()
    subject = getattr(getattr(item, "callspec", None), "params", {}).get("subject")
    found: tuple[str, ...] = getattr(subject, "dtypes", capabilities.current().dtypes)
    return found
