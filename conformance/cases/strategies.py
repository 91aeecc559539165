"""Hypothesis strategies for cases: they draw sizes, dtype, layout, content and seed; case.py makes the tensors.

Sizes depend on the device. In Triton's interpreter on the CPU a program instance takes a millisecond, so B * Hkv is at
most 3 and S at most 48, with any head_dim and group. On a GPU every (head_dim, group, dtype) is compiled, so these come
from TRIPLES, and S is at most 4096. Cases shrink to one row, one head, one slot, float32 and ordinary content.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from .. import discovery, registry
from . import contents, draws, supported
from .case import DecodeCase, WindowCase
from .layouts import LAYOUTS
from .state_trace import StateTrace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 160, 256, 17, 24, 40, 200)
#: The dtypes of plain cases (draws.py).
PLAIN_DTYPES = (torch.float32,)
GROUPS = (1, 2, 3, 4, 5, 8, 16)
SCALES = (None, 0.5, 1.0, -0.25)
TRIPLES = (
    (16, 1, torch.float32), (64, 8, torch.float16), (128, 4, torch.bfloat16), (80, 3, torch.bfloat16),
    (96, 5, torch.float16), (160, 2, torch.float32), (256, 16, torch.bfloat16), (32, 2, torch.bfloat16),
    (128, 8, torch.float32), (128, 1, torch.float16), (24, 4, torch.float32), (200, 7, torch.float16),
)
#: The triples for states on a GPU. Each compiles every kernel of a step and of a prefill.
STATE_TRIPLES = TRIPLES[:6]
#: The triple that each run with the profile gpu has. Tests of large caches compile its kernels as well.
USUAL = (128, 4, torch.bfloat16)

#: Contents of prompts and traces: those that are meaningful for many queries.
TRACE_CONTENTS = ("ordinary", "duplicates", "zero_values", "near_ties", "overflow_88", "extreme_1e4", "integers",
                  "equal_keys", "all_below_104", "identical")


#: Contents whose logits spread so far that most softmax weights underflow, so that linear scores decide little.
VANISHING = ("overflow_88", "extreme_1e4", "all_below_104")
DECIDED = tuple(content for content in TRACE_CONTENTS if content not in VANISHING)


def contents_of(names: Sequence[str], plain: Sequence[str] = ("ordinary",)) -> st.SearchStrategy[str]:
    """One of the contents `names`; in a plain round, one that is in `plain`."""
    return st.sampled_from(draws.plain_among(names, plain))


def default_device() -> torch.device:
    """The device of the implementation under test. On the CPU the plugin has set TRITON_INTERPRET."""
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() not in ("", "0", "false", "off", "no", "n")
    if interpreted or not torch.cuda.is_available():
        return torch.device("cpu")
    # Before CUDA is used, the current device is the first. Asking would use it, and some processes fork after this.
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


@st.composite
def _common(
    draw: st.DrawFn, device: torch.device | str | None, gpu_triples: tuple, rows: int = 3,
    dtypes: tuple[torch.dtype, ...] = DTYPES, head_dims: Sequence[int] = HEAD_DIMS, others: int = 1,
) -> dict:
    """Sizes and dtype. B * Hkv is at most `rows` on the CPU. others: see `_triples`."""
    where = torch.device(device) if device is not None else default_device()
    dtypes = tuple(draws.plain_among(supported.dtypes(dtypes), PLAIN_DTYPES))
    if where.type == "cpu":
        batch = draw(st.integers(1, supported.rows(rows)))
        heads = draw(_heads(rows // batch))
        head_dim = draw(st.sampled_from(supported.sizes("head_dims", head_dims)))
        group, dtype = draw(st.sampled_from(supported.sizes("groups", GROUPS))), draw(st.sampled_from(dtypes))
    else:
        batch = draw(st.integers(1, supported.rows(4)))
        heads = draw(st.sampled_from(supported.sizes("kv_heads", (1, 2, 3, 8))))
        head_dim, group, dtype = draw(st.sampled_from(_triples(gpu_triples, dtypes, head_dims, others)))
    return {
        "batch": batch, "key_value_heads": heads, "group": group, "head_dim": head_dim, "dtype": dtype,
        "device": str(where),
    }


def _triples(
    usual: tuple, dtypes: tuple[torch.dtype, ...], head_dims: Sequence[int] = HEAD_DIMS, others: int = 1
) -> list[tuple[int, int, torch.dtype]]:
    """(head_dim, group, dtype) on a GPU: those of `usual` that the implementation supports, or a dozen of its own. With
    the profile gpu, USUAL and `others` more (see `draws.usual_shape`), or one if USUAL is not among them, or a third of
    the dozen."""
    found = [
        (head_dim, group, dtype) for head_dim, group, dtype in usual
        if dtype in dtypes and head_dim in head_dims
        and supported.size("head_dims", head_dim) and supported.size("groups", group)
    ]
    if found:
        more = others * (not draws.in_usual_shape()) if USUAL in found else 1
        chosen = draws.of_run([triple for triple in found if triple != USUAL], more)
        return [triple for triple in found if triple == USUAL or triple in chosen]
    sizes = supported.sizes("head_dims", head_dims), supported.sizes("groups", GROUPS)
    return draws.third_of_run(list(itertools.islice(itertools.product(*sizes, dtypes), 12)))


def _heads(most: int) -> st.SearchStrategy[int]:
    """KV heads on the CPU: at most `most` of them, or a declared number."""
    fitting = supported.sizes("kv_heads", range(1, most + 1))
    return st.integers(1, most) if fitting == range(1, most + 1) else st.sampled_from(fitting)


def _counts(sizes: dict, most: int | None, cpu: int = 48, gpu: int = 4096, least: int = 1) -> st.SearchStrategy[int]:
    """Numbers of slots: all small ones and, on a GPU, large ones, which are rarely multiples of a block."""
    if draws.plain_only():
        most = max(least, min(most or draws.PLAIN_SLOTS, draws.PLAIN_SLOTS))
    elif most is None and sizes["device"].startswith("cpu"):
        most = cpu
    elif most is None:
        # The oracle expands keys over query heads in float64: limit that to a gigabyte.
        row = sizes["batch"] * sizes["key_value_heads"] * sizes["group"] * sizes["head_dim"]
        most = min(gpu, 2**27 // row)
    first, last, unit = supported.slots(least, most)
    if last <= 64 or first > 64:
        return st.integers(first, max(first, last)).map(lambda units: units * unit)
    return (st.integers(first, 64) | st.integers(65, last)).map(lambda units: units * unit)


def _layouts(dtype: torch.dtype, layouts: Sequence[str] = LAYOUTS) -> st.SearchStrategy[str]:
    # 2^31 elements of 4 bytes take 8 GB on a GPU, for the keys and again for the values.
    fitting = [name for name in layouts if name != "far" or dtype.itemsize == 2]
    return st.sampled_from(supported.layouts(fitting or ("contiguous",)))


def _masks(occupancy: Sequence[str], bare: str) -> st.SearchStrategy[str]:
    """One of the occupancies; at least half of the time the one without free slots, `bare`, if it is among them."""
    options = supported.occupancies(occupancy)
    return st.just(bare) | st.sampled_from(options) if bare in options else st.sampled_from(options)


def _protections(protect: Sequence[str]) -> st.SearchStrategy[str]:
    """One of the protections; at least half of the time "none", if it is among them."""
    options = supported.protections(protect)
    return st.just("none") | st.sampled_from(options) if "none" in options else st.sampled_from(options)


def _per_head(wanted: bool | None) -> st.SearchStrategy[bool]:
    options = supported.per_head((False, True) if wanted is None else (wanted,))
    return st.booleans() if len(options) == 2 else st.just(options[0])


def _scales() -> st.SearchStrategy[float | None]:
    return st.sampled_from(supported.scales(SCALES))


_SEEDS = st.integers(0, 2**31 - 1)


@st.composite
def decode_cases(
    draw: st.DrawFn, *, device: torch.device | str | None = None, slots: tuple[int, int] | None = None,
    content: Sequence[str] = contents.CONTENTS, occupancy: Sequence[str] = contents.OCCUPANCIES,
    protect: Sequence[str] = contents.PROTECTIONS, layout: tuple[str, ...] | None = None,
    per_head: bool | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> DecodeCase:
    """Inputs of a `decode_attention`. Arguments restrict what is drawn; `slots`: the least and the most S.

    In at least half of the cases every slot is occupied, since scores decide only then.
    """
    least, most = slots or (1, None)
    if draws.plain_only():
        occupancy, protect = draws.plain_among(occupancy, ("full",)), draws.plain_among(protect, ("none",))
        least = max(2, least)
    layouts = None if layout is None else st.sampled_from(supported.layouts(layout))
    scales, masks, protections = _scales(), _masks(occupancy, "full"), _protections(protect)
    per_heads = _per_head(per_head)
    sizes = draw(_common(device, TRIPLES, dtypes=dtypes))
    return DecodeCase(
        **sizes,
        content=draw(contents_of(content)),
        layout=draw(_layouts(sizes["dtype"]) if layouts is None else layouts),
        poison=draw(st.sampled_from(contents.POISONS)),
        scale=draw(scales),
        seed=draw(_SEEDS),
        slots=draw(_counts(sizes, most, least=least)),
        occupancy=draw(masks), protect=draw(protections), per_head=draw(per_heads),
    )


WINDOW_MASKS = ("none", "none", "left_padding", "random", "empty_row", "one_token")
WINDOW_PROTECTIONS = ("none", "none", "random", "all_but_one", "newest")
WINDOW_LAYOUTS = ("contiguous", "transposed", "sliced", "apart", "spread", "channels_first")


@st.composite
def window_cases(
    draw: st.DrawFn, *, device: torch.device | str | None = None, tokens: tuple[int, int] | None = None,
    content: Sequence[str] = TRACE_CONTENTS, max_window: int | None = None,
    occupancy: Sequence[str] = WINDOW_MASKS, protect: Sequence[str] = WINDOW_PROTECTIONS,
    layout: tuple[str, ...] = WINDOW_LAYOUTS, prefix_alone: bool = False,
) -> WindowCase:
    """Prompts to compress. The window is at most `max_window` and at most T; budgets go from 0 to beyond T."""
    plain = draws.plain_only()
    if plain:
        occupancy, protect = draws.plain_among(occupancy, ("none",)), draws.plain_among(protect, ("none",))
    prefixes, layouts = supported.values("prefix_alone", (prefix_alone,)), supported.layouts(layout)
    scales, kernel_sizes = _scales(), draws.plain_among(supported.values("kernel_size", (5, 1, 3, 7)), (1,))
    masks, protections = supported.occupancies(occupancy), supported.protections(protect)
    sizes = draw(_common(device, TRIPLES, rows=2))
    max_window = max_window or 64
    if sizes["device"].startswith("cpu"):
        # Every 16 queries of a query head are a program instance.
        sizes["group"] = draw(st.sampled_from(supported.sizes("groups", GROUPS[:4])))
        max_window = min(max_window, 20 if sizes["batch"] * sizes["key_value_heads"] * sizes["group"] < 4 else 10)
    least, most = tokens or (1, None)
    total = draw(_counts(sizes, most, gpu=2048, least=max(4, least) if plain else least))
    observers = draw(st.integers(1, min(max(1, total - 2) if plain else total, max_window)))
    budgets = st.integers(0, total + 2) | st.integers(min(observers, total), total)
    if plain:
        budgets = st.integers(min(observers + 1, total), max(1, total - 1))
    return WindowCase(
        **sizes,
        content=draw(contents_of(content)),
        layout=draw(st.sampled_from(layouts)),
        poison=draw(st.sampled_from(contents.POISONS)),
        scale=draw(scales),
        seed=draw(_SEEDS),
        tokens=total, observers=observers,
        budget=draw(budgets),
        kernel_size=draw(st.sampled_from(kernel_sizes)),
        occupancy=draw(st.sampled_from(masks)),
        protect=draw(st.sampled_from(protections)),
        prefix_alone=prefixes[0],
    )


PADDINGS = ("none", "none", "left_padding", "random", "empty_row")
TRACE_LAYOUTS = ("contiguous", "transposed", "sliced", "apart", "spread")


@st.composite
def state_traces(
    draw: st.DrawFn, method: str, *, device: torch.device | str | None = None, max_budget: int | None = None,
    max_prompt: int | None = None, max_steps: int | None = None, prompt: bool | None = None,
    content: Sequence[str] = TRACE_CONTENTS, padding: Sequence[str] = PADDINGS,
    layout: tuple[str, ...] = TRACE_LAYOUTS,
) -> StateTrace:
    """Runs of a method's State: a config, a prompt or none, and steps, usually more than there are free slots.

    Configs come from judge/checkers/<method>.py, with the options that the implementation declares. prompt: True always
    draws a prompt, False never. With the profile gpu, a run has a third of the layouts, and another shape than USUAL
    for a third of the methods, since each compiles the kernels of a step once more. Plain rounds have float32, which is
    another shape.
    """
    methods = [pair.name for pair in discovery.methods()]
    layouts = draws.third_of_run(supported.layouts(layout))
    sizes = draw(_common(
        device, STATE_TRIPLES, rows=2, head_dims=registry.ask(method, "HEAD_DIMS", HEAD_DIMS),
        others=int(method not in methods or method in draws.third_of_run(methods)),
    ))
    cpu = sizes["device"].startswith("cpu")
    on_cpu = (16, 8) if draws.is_quick() else (24, 10)
    longest, most = on_cpu if cpu else registry.ask(method, "LONGEST", (300, 48))
    configs = registry.ask(method, "configs", _budgets)
    config = draw(configs(max_budget or (8 if cpu else 64), 8 if cpu else 32))
    config = draw(supported.config(config, registry.pair(method).config or dict))
    with_prompt = draw(st.booleans()) if prompt is None else prompt
    first, last, unit = supported.slots(1, max_prompt or longest)
    lengths, steps = st.integers(first, last), st.integers(1, max_steps or most)
    if draws.plain_only():  # as many tokens as possible, so that some are evicted
        with_prompt = prompt is not False
        lengths, steps = st.just(last), st.just(max_steps or most)
        padding = draws.plain_among(padding, ("none",))
    length = unit * draw(lengths) if with_prompt else 0
    scaled = "scale" in inspect.signature(registry.pair(method).config or dict).parameters
    return StateTrace(
        **sizes,
        content=draw(contents_of(content)),
        layout=draw(st.sampled_from(layouts)),
        poison=draw(st.sampled_from(contents.POISONS)),
        scale=draw(_scales()) if scaled else None,
        seed=draw(_SEEDS),
        method=method,
        config=tuple(config.items()),
        prompt=length,
        padding=draw(st.sampled_from(supported.occupancies(padding))) if length else "none",
        steps=draw(steps),
        layers=draw(st.sampled_from(registry.ask(method, "LAYERS", (1,)))) if length else 1,
    )


def _budgets(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """The default configs: a budget alone."""
    return st.fixed_dictionaries({"budget": draws.budgets(most)})
