"""The properties of an implementation of which a verdict consists. This module imports nothing."""

from __future__ import annotations

#: The properties of which a verdict consists, and what each says of an implementation.
PROPERTIES = {
    "accuracy": "each number that it returns is within the bound of its arithmetic",
    "decisions": "what it evicts, keeps or chooses is right by scores within their bounds, and so are codes",
    "ties": "of equal tokens, it evicts the one with the lowest index first; of two equally near codes, the even one",
    "repeatability": "the same call gives the same bits, whatever was called before, and changes no argument",
    "independence": "rows and heads do not influence each other, nor does the place of a token",
    "free_slots": "free slots and padding influence nothing and are filled first",
    "extreme_numbers": "logits beyond the range of exp, zeros, subnormal numbers, infinite values",
    "layouts": "strided, transposed, repeated and large tensors",
    "state": "a state is right over prompts, steps, reset and reorder",
    "traces": "decisions on the recorded traces of a trained model",
    "bad_input": "wrong arguments raise errors",
}
#: What each property says, where the words above name its cases alone: for "Expected: ...".
EXPECTED = {
    "extreme_numbers": "right results for logits beyond the range of exp, zeros, subnormal numbers and infinite values",
    "layouts": "right results for strided, transposed, repeated and large tensors",
    "traces": "right decisions on the recorded traces of a trained model",
}
#: Properties that every call judges, and that a verdict shows if they are wrong.
SURVIVES, FAIR_PLAY = "survives", "fair_play"
OF_CALLS = {
    SURVIVES: "each call returns: no abort, exit, endless loop, lack of memory or illegal access",
    FAIR_PLAY: "each call computes its result itself, from its arguments, and leaves alone what judges it",
}
ALL = {**OF_CALLS, **PROPERTIES}
#: Those that a verdict of "right" needs.
CORE = ("accuracy", "decisions", "free_slots", "repeatability")
#: The page of the documentation, and its section, that explains each property.
PAGES = {
    SURVIVES: "docs/how-to/test-your-kernel.md#calls-that-do-not-return",
    FAIR_PLAY: "docs/how-to/test-your-kernel.md#calls-that-only-look-right",
    "accuracy": "docs/explanation/bounds.md#bounds",
    "decisions": "docs/explanation/bounds.md#evictions",
    "ties": "docs/explanation/ties.md#exact-ties",
    "repeatability": "docs/how-to/test-your-kernel.md#which-cases",
    "independence": "docs/tutorial/verify.md#2-verify-it",
    "free_slots": "docs/tutorial/verify.md#3-read-the-causes",
    "extreme_numbers": "docs/tutorial/verify.md#3-read-the-causes",
    "layouts": "docs/tutorial/verify.md#2-verify-it",
    "state": "docs/how-to/states.md#test-a-state-of-your-own",
    "traces": "docs/how-to/test-your-kernel.md#what-it-means-for-a-model",
    "bad_input": "docs/explanation/reliability.md#wrong-arguments",
}
