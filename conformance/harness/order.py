"""The order of tests in a run of several processes: long ones first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from .results import FACTS

#: The methods whose kernels take longest to compile. Their long tests come before those of other methods.
SLOWEST = ("longflow", "thinkv", "kivi")


def longest_first(items: Sequence[Any], long: Sequence[Sequence[Any]], workers: int) -> list[Any]:
    """Order the items so that each part that pytest-xdist first hands to one of the `workers` begins with whole groups
    of `long` ones, as far as they fit into it.

    Tests of a group share most kernels, which one process compiles once.
    """
    in_groups = {item for group in long for item in group}
    others = [item for item in items if item not in in_groups]
    ordered: list[Any] = []
    for worker in range(workers):
        size = (len(items) - len(ordered)) // (workers - worker)
        first = [item for group in long[worker::workers] for item in group]
        rest = max(0, size - len(first))
        ordered += [*first, *others[:rest]]
        others = others[rest:]
    return [*ordered, *others]


def put_in_order(items: list[pytest.Item]) -> None:
    """In a run of several processes, let each begin with long tests."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    groups: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("first") is not None:
            groups.setdefault((item.path, item.stash[FACTS]["method"]), []).append(item)
    long = sorted(groups.values(), key=lambda group: group[0].stash[FACTS]["method"] not in SLOWEST)
    items[:] = longest_first(items, long, workers)
