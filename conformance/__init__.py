"""The conformance suite: float64 arithmetic judges between two implementations of every method.

``python -m kvtwin.conformance`` runs it; ``pytest --pyargs kvtwin.conformance`` does too, with all of pytest's options.
"""
