"""The conformance suite: it compares implementations of every method with the reference run in float64.

Run it with ``python -m kvtwin.conformance``, or with ``pytest --pyargs kvtwin.conformance`` and pytest's options. An
implementation's module declares what it supports with `Capabilities`. A package declares a method of its own with a
`Method`.
"""

from .capabilities import Capabilities
from .own_methods import Method, MethodError

__all__ = ["Capabilities", "Method", "MethodError"]
