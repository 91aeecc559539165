"""What a test raises if the implementation under test lacks something: pytest skips it, as *not provided*."""

from __future__ import annotations

from typing import Any

import pytest

NOT_PROVIDED = "not provided: "
_Skipped: Any = pytest.skip.Exception  # the class is public, its type is not


class NotProvided(_Skipped):
    """Raised if a test uses something that the implementation under test does not have."""

    def __init__(self, what: str) -> None:
        super().__init__(NOT_PROVIDED + what)


class EnvironmentLimit(NotProvided):
    """Raised in place of an error that Triton's interpreter makes, not the implementation under test."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.msg = ENVIRONMENT + what


#: What begins the name of a refusal that is not the implementation's.
ENVIRONMENT = "environment: "
