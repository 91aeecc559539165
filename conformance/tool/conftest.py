"""A fixture for tests of the plugin, which use pytester."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings


@pytest.fixture
def in_process(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Run pytest on files that the test writes, with our part of the plugin active."""

    def run(*arguments: str, active: bool = True) -> pytest.RunResult:
        profile = ("--hypothesis-profile", settings.get_current_profile_name())
        chosen = ("--kv-device", "auto") if active else ()
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *profile, *chosen, *arguments)

    return run
