"""A cache that keeps the tokens with the smallest key norms, as a method of kvtwin."""

from kvtwin.conformance import Method

METHOD = Method(
    name="key_norm",
    reference="key_norm.reference",
    optimized="key_norm.optimized",
    checker="key_norm.checker",
    configs="key_norm.checker:configs",
)
