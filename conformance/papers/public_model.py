"""What the stored results of a public model, fixtures/known_results, say about the order of methods.

It has 135 million parameters and its own tasks, so it refutes no paper's observation on larger ones: such a claim is
unproven, and says what the model shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvtwin.fixtures

RESULTS = Path(kvtwin.fixtures.__file__).parent / "known_results" / "results.jsonl"
#: Budgets with which methods evict: shares of a context.
DIVISORS = (2, 4, 10, 20)


def points() -> dict[tuple[str, str, int], dict[str, Any]]:
    """The results of the optimized side by task, method and divisor of the budget."""
    rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    return {
        (row["task"], row["method"], int(row["point"].rpartition("/")[2])): row
        for row in rows if row["side"] == "optimized"
    }


def order(method: str, others: Sequence[str]) -> Counter[str]:
    """How often a method is better than all others ("above"), and worse than one of them ("below"), over the tasks and
    budgets at which it was measured. One result is better than another if their intervals of 95 % are apart."""
    found, counts = points(), Counter[str]()
    for task, divisor in dict.fromkeys((task, divisor) for task, _, divisor in found):
        if divisor in DIVISORS and (task, method, divisor) in found:
            own, them = found[task, method, divisor], [found[task, other, divisor] for other in others]
            counts["above"] += all(_better(own, other) for other in them)
            counts["below"] += any(_better(other, own) for other in them)
            counts["points"] += 1
    return counts


def _better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if "perplexity" in one:
        return bool(one["high"] < other["low"])
    return bool(one["low"] > other["high"])
