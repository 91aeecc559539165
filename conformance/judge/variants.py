"""Variants: what a state can do, each judged in lockstep by one trace.

A method's checker declares its variants once, in the table VARIANTS, with a row for each: options of the config, and
the trace that reaches what these options do. GENERIC has those of every method. So a mistake that needs certain
options, sizes or contents is met by construction, rather than when they happen to be drawn. Traces are wide in shape
and small in everything else, since a program of the interpreter takes a millisecond.

The state under test may declare less (`Capabilities`). Then it gets what is next to a variant: fewer rows, other heads,
no padding. If it takes none of the variant's options, it does not provide the variant.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import capabilities, discovery, stats
from ..cases import strategies, supported
from ..cases.layouts import MIXED
from ..cases.state_trace import StateTrace
from . import checkers, lockstep, whole

#: A trace unless a variant says otherwise: rows of different ages, three KV heads, more tokens than a small budget.
BUSY: dict[str, Any] = {
    "batch": 2, "key_value_heads": 3, "group": 2, "padding": "stairs", "prompt": 14, "steps": 7, "reorder_at": 4,
}
BUDGET = 6
#: One row and one head, whose prompt is whole.
ONE: dict[str, Any] = {"batch": 1, "key_value_heads": 1, "group": 1, "padding": "none", "reorder_at": -1}
#: Tokens with equal scores, three at a time, of which some are to be evicted.
CLASSES: dict[str, Any] = {
    "batch": 1, "group": 1, "padding": "none", "reorder_at": -1, "content": "classes", "prompt": 44,
}
#: A trace that decided too little is run again with other numbers, at most so many times.
MOST_SEEDS = 5


@dataclass(frozen=True)
class Variant:
    """A row of a table of variants.

    name: unique in its method, part of the test's name. options: of the config, besides a small `budget`
    (checkers.small) and `max_tokens`, which covers the trace. trace: fields of StateTrace that differ from BUSY. long:
    the profile quick leaves it out on a CPU. served: for a GPU alone. whole: a state that takes blocks gets prompts of
    several blocks (judge/whole.py).
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)
    budget: int = BUDGET
    long: bool = False
    served: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return self.name


def variant(name: str, options: Mapping[str, Any] | None = None, *, budget: int = BUDGET, long: bool = True,
            served: bool = False, whole: bool = False, **trace: Any) -> Variant:
    """A variant, with the fields of its trace as keyword arguments."""
    return Variant(name, options or {}, trace, budget, long, served, whole)


#: A prompt that a library's attention may take, which knows no padding between tokens.
LONG_PROMPT: dict[str, Any] = {
    "batch": 2, "key_value_heads": 1, "prompt": 640, "steps": 2, "reorder_at": -1, "dtype": torch.float16,
    "head_dim": 64, "scale": 0.3,
}
LONG_PROMPT_PADDINGS = ("none", "ends", "gap")


#: The variants of every method.
GENERIC = (
    variant(
        "rows-in-another-order-and-reset", batch=3, key_value_heads=2, group=1, prompt=16, steps=10, reorder_at=2,
        reset_at=8, long=False,
    ),
    variant("padding-comes-last", padding="stairs_down", poison="largest", long=False),
    variant("padding-anywhere-and-strides", padding="random", poison="stale", layout=MIXED),
    variant("no-prompt", prompt=0, steps=14),
    variant("five-heads-in-groups-of-three", **ONE | {"key_value_heads": 5, "group": 3}, prompt=9, steps=4),
    # As of SmolLM2-135M.
    variant("three-wide-heads-in-groups-of-three", **ONE | {"key_value_heads": 3, "group": 3}, head_dim=64,
            dtype=torch.bfloat16, prompt=9, steps=4),
    variant("nine-heads", **ONE | {"key_value_heads": 9}, prompt=9, steps=4),
    variant("many-periods", **ONE | {"prompt": 7, "steps": 40}),
    *(variant(f"prompt-of-{tokens}", **ONE, prompt=tokens, steps=2, budget=budget, long=tokens > 33)
      for tokens, budget in ((33, 20), (65, 40), (129, 31))),
    *(variant(f"budget-of-{budget}", **ONE, prompt=budget + 3, steps=3, budget=budget) for budget in (33, 64, 129)),
    variant("float16", dtype=torch.float16),
    variant("bfloat16-in-wide-heads", dtype=torch.bfloat16, head_dim=64, key_value_heads=1),
    variant("equal-tokens", content="duplicates"),
    variant("zero-values-beside-free-slots", content="zero_values", budget=18),
    *(variant(f"long-prompt-with-padding-{padding}", **LONG_PROMPT, padding=padding, budget=40, served=True)
      for padding in LONG_PROMPT_PADDINGS),
    variant("after-a-reset", after_reset=True),
)


#: Those of states that take blocks of tokens at any time.
BLOCKS = (
    variant("second-turn", {"block_size": 3}, turns=((1, 4),)),
    variant("turns-of-strides", {"block_size": 2}, turns=((0, 1), (3, 3)), layout="sliced", padding="random"),
    variant("blocks-of-one", {"block_size": 1}, prompt=9, steps=3, padding="none"),
    variant("one-block", {"block_size": 32}),
    # Blocks of an odd size and of an even one: an implementation may take them by different kernels.
    *(variant(f"blocks-of-{size}", {"block_size": size}, **ONE, budget=50, prompt=2 * size, steps=3)
      for size in (35, 36)),
    variant("budget-of-1", budget=1, steps=4),
    # Of logits below, about and far beyond it.
    variant("softcapped-logits", {"softcap": 2.0}, turns=((2, 9),), scale=1.0, long=False),
    variant("softcapped-logits-in-one-block", {"softcap": 1.5, "block_size": 32}, scale=-4.0, padding="random",
            dtype=torch.bfloat16),
    variant("attention-sinks", sink_logits=True, turns=((2, 9),), scale=1.0, long=False),
    # Of several tiles, which programs may share.
    variant("attention-sinks-and-a-softcap", {"softcap": 1.5, "block_size": 40},
            **ONE | {"key_value_heads": 2, "group": 3}, sink_logits=True, scale=1.0, prompt=35, dtype=torch.bfloat16),
    # The last block has one token, less than a window of queries.
    variant("whole-prompts", {"block_size": 3}, prompt=13, steps=8, turns=((2, 5),), padding="none", whole=True),
    variant("whole-padded-prompts", {"block_size": 4}, prompt=13, steps=8, turns=((1, 6),), whole=True),
    # Of one size, so that an implementation may launch their blocks together, each time more of them.
    variant("whole-prompts-of-many-blocks", {"block_size": 2}, prompt=67, steps=210, padding="none",
            turns=((1, 67), (69, 67), (138, 67)), served=True, whole=True),
    variant("equal-scores", {"block_size": 10}, **CLASSES, budget=13, steps=3),
    variant("equal-keys-in-several-tiles", {"block_size": 3}, **ONE | {"group": 6}, content="two_keys", budget=36,
            prompt=45, steps=4),
)
#: Those of states that may evict once in several tokens.
INTERVALS = (
    variant("interval", {"interval": 4, "block_size": 5}, steps=12),
    variant("softcapped-logits-at-intervals", {"interval": 3, "block_size": 5, "softcap": 2.0}, steps=12, scale=1.0),
    variant("attention-sinks-at-intervals", {"interval": 3, "block_size": 5}, sink_logits=True, steps=12, scale=1.0),
    variant("interval-and-turns", {"interval": 4, "block_size": 3}, steps=12, turns=((2, 5),), long=False),
    variant("interval-of-several-tiles", {"interval": 20}, **ONE, budget=30, prompt=34, steps=45),
)


def variants_of(method: str) -> list[Variant]:
    """The variants of a method: GENERIC and its own. Of several with one name, the last one."""
    return list({one.name: one for one in (*GENERIC, *checkers.ask(method, "VARIANTS", ()))}.values())


def _lacking(what: str) -> Exception:
    """The error for what the implementation under test does not provide."""
    from ..refusals import NotProvided

    return NotProvided(what)


def trace_of(found: discovery.Pair, one: Variant, seed: int, device: torch.device) -> StateTrace:
    """The trace of a variant, within what the implementation under test declares. Raises NotProvided."""
    trace = {"dtype": torch.float32, "head_dim": 16, "layout": "contiguous", **BUSY, **one.trace}
    if device.type != "cpu" and not {"head_dim", "dtype"} & one.trace.keys():
        trace["head_dim"], trace["group"], trace["dtype"] = strategies.USUAL  # whose kernels other tests compile, too
    trace |= {name: _size(declared, trace[name]) for name, declared in SIZES.items()}
    trace |= {"batch": supported.rows(trace["batch"]), "dtype": _dtype(trace["dtype"])}
    can = capabilities.current()
    if not trace["prompt"] or not can.masks:
        trace["padding"] = "none"
    if can.contiguous_only:
        trace["layout"] = "contiguous"
    if not (can.scale and "scale" in inspect.signature(found.config or dict).parameters):
        trace.pop("scale", None)
    if trace.get("pages"):
        trace["pages"] = _size("page_sizes", trace["pages"])
    trace |= _lengths(trace)
    options = _options(found, one, _tokens(trace))
    return StateTrace(
        **trace, method=found.name, config=tuple(options.items()), seed=seed, device=str(device),
    )


SIZES = {"key_value_heads": "kv_heads", "group": "groups", "head_dim": "head_dims"}


def _size(declared: str, usual: int) -> int:
    return supported.sizes(declared, (usual,))[0]


def _dtype(usual: torch.dtype) -> torch.dtype:
    declared = capabilities.current().dtypes
    return usual if str(usual).removeprefix("torch.") in declared else getattr(torch, declared[0])


def _lengths(trace: dict[str, Any]) -> dict[str, int]:
    """A prompt of the declared lengths."""
    can, prompt = capabilities.current(), trace["prompt"]
    unit = can.slots_multiple_of
    if can.max_slots is not None and _tokens(trace) > can.max_slots:
        raise _lacking(f"{_tokens(trace)} tokens (not declared: max_slots)")
    return {"prompt": -(-prompt // unit) * unit}


def _tokens(trace: dict[str, Any]) -> int:
    """The most tokens that the state holds; before a reset, it holds the prompt twice."""
    return int(trace["prompt"] + max(trace["steps"], trace["prompt"] if trace.get("after_reset") else 0))


def _options(found: discovery.Pair, one: Variant, tokens: int) -> dict[str, Any]:
    """The keyword arguments of the config, with declared values in place of those that are not."""
    made = found.config
    assert made is not None
    given = {
        **checkers.with_budget(found.name, one.budget), **checkers.small(found.name, one.budget),
        **checkers.ask(found.name, "DECIDING", {}), **one.options,
    }
    if "max_tokens" in inspect.signature(made).parameters and "max_tokens" not in one.options:
        given["max_tokens"] = max(24, given.get("max_tokens", 0), -(-(tokens + 1) // 8) * 8)
    others = supported.undeclared(given, made)
    lacking = sorted(others.keys() & one.options.keys())
    if lacking:
        raise _lacking(f"{one} (not declared: {', '.join(lacking)})")
    for values in itertools.product(*others.values()):
        chosen = {**given, **dict(zip(others, values, strict=True))}
        try:
            made(**chosen)
        except (TypeError, ValueError):
            if not others:
                raise
            continue
        return chosen
    raise _lacking(f"{one} (not declared: {', '.join(others)})")


def check(found: discovery.Pair, one: Variant, module: Any, device: torch.device) -> None:
    """Run a variant's trace in lockstep; with other numbers again, until it has decided enough. Raises
    compare.Mismatch."""
    state = getattr(module, checkers.state_name(found.name))
    for number in range(MOST_SEEDS):
        trace = trace_of(found, one, _seed(found, one, number), device)
        if trace.pages and "pages" not in inspect.signature(state).parameters:
            raise _lacking(f"{module}.{state.__name__}: pages")
        if trace.sink_logits and "sink_logits" not in inspect.signature(state).parameters:
            raise _lacking(f"{module}.{state.__name__}: sink_logits")
        if trace.turns and not hasattr(state, "append_block"):
            raise _lacking(f"{module}.{state.__name__}.append_block")
        summary = (whole if one.whole else lockstep).run(trace, module)
        counted = stats.current()
        if (counted is None or not counted.vacuous) and not (one.whole and summary.undecided):
            return


def _seed(found: discovery.Pair, one: Variant, number: int) -> int:
    """The seed of a trace: another one in a run with another seed."""
    from hypothesis import core

    digest = hashlib.sha256(f"{core.global_force_seed} {found} {one} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
