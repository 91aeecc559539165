"""A method for kvtwin: after each block of tokens, a cache keeps the tokens with the smallest key norms."""

from kvtwin.conformance import Method

METHOD = Method(
    name="key_norm",
    reference="key_norm.reference",
    optimized="key_norm.optimized",
    checker="key_norm.checker",
    configs="key_norm.checker:configs",
)
