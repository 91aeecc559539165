"""Cases of the sizes that people serve, for a GPU: heads of well-known models, large batches, long contexts.

One call of such a case judges 64 to 2,048 decisions, and reaches the tiles, splits and grids that small cases never
have. The sizes are not drawn: each property of each function has its share of them by construction, others in a run
with another seed. Everything else (contents, masks, budgets) comes from the strategy of the property.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from ...reference.contract.scales import FP8
from .. import capabilities, stats
from ..cases import draws, strategies, supported
from ..cases.case import Case
from ..cases.state_trace import StateTrace
from . import checkers, pieces
from .subjects import StateSubject, Subject

#: Query heads, KV heads and head_dim of Qwen3-8B and Llama-3.1-8B, GPT-OSS, Qwen3-0.6B to 1.7B, Qwen3-14B, Gemma-2B and
#: SmolLM2-135M.
MODELS = ((32, 8, 128), (64, 8, 64), (16, 8, 128), (40, 8, 128), (8, 1, 256), (9, 3, 64))
#: Rows, and slots or tokens; every other case has one more of these, after the last whole tile.
SIZES = ((64, 3200), (256, 1024), (8, 32768), (1, 131072))
DTYPES = (torch.bfloat16, torch.float16)
#: Cases of accuracy, and of decisions: each model. Of repeatability: each model in both dtypes. Of others: each size.
CORE = ("accuracy", "decisions")
COUNTS = {**dict.fromkeys(CORE, len(MODELS)), "repeatability": 2 * len(MODELS)}
OTHER_CASES = len(SIZES)
#: The most queries of a case: a decode step, a window, a block of a few tokens.
MOST_QUERIES = 16
#: Layouts that would take many times the memory of the numbers; small cases have them.
TOO_LARGE = ("spread", "spread_by_3", "far")
#: A state's rows, prompt and steps; the steps of one of a single row, and the sizes of a call that is made often.
ROWS, PROMPT, STEPS = 64, 160, 200
LONG, OFTEN = 520, (64, 1024)
#: What the scores of a call that is made often are like.
CLOSE = {"content": "ordinary", "scale": None}
#: The share of a GPU's memory that a case may need.
SHARE = 0.7


def number_of(*what: object) -> int:
    """A number for this run and `what`: another one in a run with another seed."""
    from hypothesis import core

    return int.from_bytes(hashlib.sha256(repr((core.global_force_seed, *map(str, what))).encode()).digest()[:6], "big")


def cases(subject: Subject, prop: str, sizes: Sequence[tuple[int, int]] | None = None) -> Iterator[Case]:
    """The cases of a property. Tensors of a case are freed when the next one is asked for. sizes: other than SIZES, one
    case of each."""
    plain, varied = subject.properties["accuracy"], []
    for argument, values in subject.properties[prop].items():
        fitting = tuple(value for value in values if value not in TOO_LARGE)
        if values != plain.get(argument):
            varied += [{argument: (value,)} for value in fitting]
    core = prop in CORE
    count = len(sizes) if sizes else COUNTS.get(prop, OTHER_CASES) if not subject.also else OTHER_CASES
    # Accuracy and decisions have the two halves of all models and dtypes.
    start = number_of(subject) + count * CORE.index(prop) if core else number_of(subject, prop)
    for number, (model, (batch, slots), dtype) in enumerate(_sizes(subject, sizes or SIZES, start, count)):
        assert subject.sized is not None
        more = [varied[(start + number) % len(varied)]] if varied else []
        case = _drawn([
            subject.draw(prop, **{subject.sized: (slots, slots)}, **one) for one in (*more, {})
        ], number_of(subject, prop, number, "drawn"))
        case = _with_sizes(case, model, batch, dtype, number_of(subject, prop, number) % 2**31)
        if sizes:  # scores as close as in a model, so that the order of a sum may decide
            case = dataclasses.replace(case, **{name: value for name, value in CLOSE.items() if hasattr(case, name)})
        if prop == "free_slots" and hasattr(case, "poison") and number % 2:
            case = dataclasses.replace(case, poison="nan")  # which no weight of zero hides
        if _fits(case):
            yield case
            _release(case)


def _sizes(
    subject: Subject, given: Sequence[tuple[int, int]], start: int, count: int
) -> list[tuple[Any, Any, Any]]:
    """The model, the size and the dtype of `count` cases, inside of what is declared: each model in one dtype, then
    each in the next one."""
    models = [model for model in MODELS if _declared(*model)] or [_nearest()]
    sizes = list(dict.fromkeys(filter(None, (_declared_size(*size, subject.longest) for size in given))))
    dtypes = _dtypes()
    beyond = 1
    if given is not SIZES and not draws.shares_kernels():  # sums of the most heads
        models = [max(models)]
    if draws.shares_kernels():  # the kernels of this shape are compiled anyway
        models, dtypes, count, beyond = models[:1], dtypes[:1], min(count, len(sizes)), 0
    both = [
        (model, dtypes[(place + turn) % len(dtypes)]) for turn in range(len(dtypes))
        for place, model in enumerate(models)
    ]
    made = []
    for number in range(count):
        batch, slots = sizes[number % len(sizes)]
        model, dtype = both[(start + number) % len(both)]
        odd = (start // count + number + number // len(sizes)) % 2  # each size in both ways, of accuracy and decisions
        more = _declared_size(batch, slots + beyond * odd, subject.longest)
        made.append((model, more or (batch, slots), dtype))
    return made


def _dtypes() -> list[torch.dtype]:
    """The declared ones of DTYPES, or those that are declared."""
    declared = [getattr(torch, name) for name in capabilities.current().dtypes]
    return [dtype for dtype in DTYPES if dtype in declared] or declared


def _declared(query_heads: int, key_value_heads: int, head_dim: int) -> bool:
    return supported.size("head_dims", head_dim) and supported.size("kv_heads", key_value_heads) and supported.size(
        "groups", query_heads // key_value_heads
    )


def _nearest() -> tuple[int, int, int]:
    """Declared sizes, if no model has them."""
    group, heads, head_dim = (
        supported.sizes(name, (usual,))[0] for name, usual in (("groups", 4), ("kv_heads", 8), ("head_dims", 128))
    )
    return group * heads, heads, head_dim


def _declared_size(batch: int, slots: int, longest: int | None) -> tuple[int, int] | None:
    """The size inside of what is declared; None if that has no such slots."""
    first, last, unit = supported.slots(1, min(slots, longest or slots))
    return (supported.rows(batch), last * unit) if last >= first else None


def _drawn(strategies: Sequence[st.SearchStrategy[Any]], number: int) -> Any:
    """An example of the first of these strategies that has one. Raises NotProvided if none has, which depends on what
    the implementation declares. The example is not the simplest one, which Hypothesis draws first."""
    from ..refusals import NotProvided

    found: list[Any] = []
    refused = stats.Stats()
    for strategy in strategies:

        @seed(number)
        @settings(
            max_examples=2, phases=[Phase.generate], database=None, deadline=None, derandomize=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def collect(example: Any) -> None:
            found.append(example)

        with stats.collect(refused), suppress(Unsatisfiable):
            collect()
        if found:
            return found[-1]
    raise NotProvided(", ".join(refused.refused) or "a case of these sizes")


def _with_sizes(case: Any, model: Sequence[int], batch: int, dtype: torch.dtype, numbers: int) -> Any:
    query_heads, key_value_heads, head_dim = model
    changes: dict[str, Any] = {
        "batch": batch, "key_value_heads": key_value_heads, "group": query_heads // key_value_heads,
        "head_dim": head_dim, "seed": numbers, "dtype": case.dtype if case.dtype in FP8 else dtype,
    }
    for name in ("queries", "observers"):
        if hasattr(case, name):
            changes[name] = min(getattr(case, name), MOST_QUERIES)
    return dataclasses.replace(case, **{name: value for name, value in changes.items() if name not in case.fixed})


def _release(case: Case) -> None:
    """Give the memory that a case has used back to the GPU: pieces of it may not fit the next one."""
    if case.device.startswith("cuda"):
        torch.cuda.empty_cache()


def _fits(case: Case) -> bool:
    """Whether this GPU has the memory: numbers in a few copies, and a piece of the oracle's in float64."""
    device = torch.device(case.device)
    if device.type == "cpu":
        return True
    row = pieces.elements_of_row(case)
    numbers = 2 * case.batch * row // case.group * 4 * 4
    needed = numbers + 16 * 8 * max(row, min(pieces.MOST_ELEMENTS, row * case.batch))
    return needed < SHARE * torch.cuda.get_device_properties(device).total_memory


def traces(subject: StateSubject) -> Iterator[StateTrace]:
    """Traces of a state: a prompt of padded rows, then STEPS steps at ROWS rows; one in each dtype."""
    start, only = number_of(subject), checkers.ask(subject.method, "HEAD_DIMS", None)
    models = [model for model in MODELS if _declared(*model) and (only is None or model[2] in only)]
    dtypes = _dtypes()
    if draws.shares_kernels():
        models, dtypes = models[:1], dtypes[:1]
    for number, dtype in enumerate(dtypes):
        strategy = strategies.state_traces(subject.method, prompt=True, padding=("random", "left_padding"), layout=(
            "contiguous",), content=strategies.DECIDED, max_budget=64, max_prompt=PROMPT)
        trace = _drawn([strategy], number_of(subject, number))
        model = models[(start + number) % len(models)] if models else _nearest()
        rows = supported.rows(checkers.ask(subject.method, "SERVED_ROWS", ROWS))
        trace = _with_sizes(trace, model, rows, dtype, number_of(subject, "trace", number) % 2**31)
        yield dataclasses.replace(trace, steps=STEPS, layers=min(trace.layers, 2))


def long_trace(subject: StateSubject) -> StateTrace:
    """A trace of LONG steps of one row and one head, for what goes wrong late: counters, periods, many rounds."""
    trace = _drawn([strategies.state_traces(
        subject.method, prompt=True, padding=("none",), layout=("contiguous",), content=("ordinary",), max_budget=32,
        max_prompt=24,
    )], number_of(subject, "long"))
    options = trace.options
    if "max_tokens" in options:
        options["max_tokens"] = -(-(trace.prompt + LONG + 1) // 128) * 128
    sizes = {"key_value_heads": supported.sizes("kv_heads", (1,))[0], "group": supported.sizes("groups", (1,))[0],
             "head_dim": supported.sizes("head_dims", (64,))[0]}
    return dataclasses.replace(
        trace, **sizes, batch=1, layers=1, steps=LONG, config=tuple(options.items()), dtype=_dtypes()[0],
        seed=number_of(subject, "long", "numbers") % 2**31,
    )
