"""The conformance suite: it compares implementations of every method with the reference run in float64.

Run it with ``python -m kvtwin.conformance``, or with ``pytest --pyargs kvtwin.conformance`` and pytest's options. An
implementation's module declares what it supports with `Capabilities`.
"""

from .capabilities import Capabilities

__all__ = ["Capabilities"]
