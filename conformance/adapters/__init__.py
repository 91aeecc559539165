"""Adapters that give third-party packages our interface, for ``--kv-impl``. They only translate.

An adapter has attributes with our methods' names, which have the functions that the package supports. Missing functions
are reported as *not provided*. If a function does not support an argument, such as a mask, the adapter raises
NotImplementedError with its name: the example is skipped, and the summary counts it.

``<name>.xfails`` beside an adapter lists the tests that fail because of known differences: docs/how-to/kvpress.md.
"""
