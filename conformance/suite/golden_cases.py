"""What the golden tests of methods with a recorder of their own share: two traces, and a test for each recorded case.

A method has a trace of our own model, the fixture `traces`, and one of a public model, the fixture `known`. Each is a
pair: the capture, and the decisions that were recorded on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ...fixtures.load import load_trace


def of_method(method: str, cases: Mapping[str, Sequence[str]]) -> tuple[Any, Any, Any, Any]:
    """The fixtures `traces` and `known`, the mark that runs a test for each ("traces" or "known", case), and a test
    that the cases of both are the recorded ones. cases: of each fixture."""
    def fixture(prefix: str) -> Any:
        @pytest.fixture(scope="module")
        def traces() -> Any:
            return load_trace(f"{prefix}capture"), load_trace(f"{prefix}{method}")

        return traces

    def test_every_recorded_case_is_replayed(traces: Any, known: Any) -> None:
        for name, (_, golden) in {"traces": traces, "known": known}.items():
            assert set(golden.metadata["cases"]) == set(cases[name])

    each = [(which, case) for which, names in cases.items() for case in names]
    mark = pytest.mark.parametrize(("which", "case"), each)
    return fixture(""), fixture("known_"), mark, test_every_recorded_case_is_replayed
