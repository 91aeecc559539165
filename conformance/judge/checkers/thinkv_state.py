"""Checker of ThinKV's state: at each step, attention and sparsity within their bounds, and exactly equal contents.

k-means decides which tokens of a shrinking segment are kept, and an early legal tie changes all later rounds. So the
reference takes these choices from the module under test: it calls that module's `select_representatives` with the
segment's keys, checks each result round by round, and expects the tested state to keep exactly these tokens. A thought
type may differ where the interval of the sparsity contains an edge; the reference adopts it.
"""

from __future__ import annotations

import copy
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.thinkv.eviction import segment_representatives
from ....reference.thinkv.paging import in_order
from ...cases import draws
from ...cases.layouts import MIXED
from .. import host, lockstep
from ..choices import Verdict
from ..compare import assert_same, fail
from ..variants import LONG_PROMPT, LONG_PROMPT_PADDINGS, ONE, variant
from . import thinkv_paging
from .thinkv_eviction import assert_representatives_right

#: Windows of two tokens, so that a window ends at every other step. On a GPU, graphs replay many steps.
SMALL = {
    "tau": 2, "group": 2, "block": 2, "retention": (1,), "edges": (0.2, 0.5), "sparsity_threshold": 0.3,
    "max_tokens": 160 if torch.cuda.is_available() else 24,
}
LOSSY = True
#: The modules of our states.
OURS = ("kvtwin.reference.", "kvtwin.optimized.")
#: Short on a GPU, since the reference runs token by token and launches a kernel for every operation.
SERVED_ROWS = 8
LONGEST = (140, 24)
FORMATS = (
    "nvfp4 nvfp4 ternary", "fp8 nvfp4 ternary", "int4 int4 int2", "unquantized unquantized unquantized",
)
#: The paper's sizes, but for tau.
PAPER: dict[str, Any] = {"tau": 16, "group": 16, "block": 8, "retention": (64, 32, 16, 8, 4)}
MEAN: dict[str, Any] = {"sparsity_of": "mean"}
COMPILED = tuple(
    {"formats": dict(zip("RET", formats.split(), strict=True)), **sizes}
    for formats, sizes in (
        *((formats, MEAN) for formats in FORMATS[1:]),
        (FORMATS[0], PAPER | MEAN),
        *((formats, PAPER) for formats in (FORMATS[0], "nvfp4 int4 int2")),
    )
)


#: tau, group, block, retention, formats. Groups that do not divide a segment, blocks that do not divide a group, one
#: level, segments that lose all tokens; the sizes for which fragments of 16-bit numbers have kernels of their own.
SHAPES: tuple[tuple[tuple[int, int, int, tuple[int, ...]], str, dict[str, Any]], ...] = (
    ((6, 4, 2, (4, 2)), FORMATS[0], {}), ((10, 4, 3, (7, 7, 2)), FORMATS[2], {}), ((7, 1, 1, (5, 3)), FORMATS[1], {}),
    ((8, 4, 2, (4, 0)), FORMATS[3], {}), ((6, 8, 8, (3,)), FORMATS[0], {}),
    ((16, 16, 8, (8, 4, 1)), FORMATS[0], {"head_dim": 64, "dtype": torch.bfloat16}),
)
VARIANTS = (
    *(variant(
        f"segments-of-{shape[0]}-{shape[1]}-{shape[2]}",
        {**dict(zip(("tau", "group", "block", "retention"), shape, strict=True)),
         "formats": dict(zip("RET", formats.split(), strict=True)), "sparsity_of": ("heads", "mean")[number % 2]},
        budget=2 * shape[0], prompt=4 * shape[0] + 3, steps=shape[0] + 3, key_value_heads=1 + number % 3,
        padding=("random", "stairs")[number % 2], poison="stale", long=number > 0, **more,
    ) for number, (shape, formats, more) in enumerate(SHAPES)),
    variant("segments-end-within-a-group", {"tau": 6, "group": 4, "block": 2, "retention": (4, 2)}, prompt=0, steps=20,
            padding="none", budget=12),
    variant("groups-of-three", {"tau": 10, "group": 3, "block": 2, "retention": (5, 2)}, batch=3, padding="random",
            layout=MIXED, key_value_heads=2, head_dim=20, prompt=53, steps=3, budget=20),
    variant("groups-of-few-tokens-come-back", {"tau": 6, "group": 4, "block": 2, "retention": (2, 0)}, prompt=27,
            steps=14, key_value_heads=1, padding="random", budget=10),
    variant("segments-that-lose-none-at-first", {"tau": 4, "group": 2, "block": 2, "retention": (6, 4)}, prompt=23,
            padding="random", budget=8),
    variant("sizes-of-the-paper", {"tau": 128, "group": 16, "block": 8, "retention": (64, 32, 16, 8, 4)},
            layout="transposed", key_value_heads=1, group=1, head_dim=128, prompt=300, steps=2, budget=160),
    *(variant(f"long-prompt-with-padding-{padding}", {"tau": 128, "group": 16, "block": 8, "retention": (64, 8)},
              **LONG_PROMPT, padding=padding, budget=300, served=True) for padding in LONG_PROMPT_PADDINGS),
    variant("many-short-segments", {"tau": 1, "group": 1, "block": 2, "retention": (1, 0)}, **ONE | {
        "padding": "random"}, prompt=33, steps=1),
    variant("three-heads-in-many-chunks", {"tau": 16, "group": 8, "block": 2, "retention": (8, 4)},
            **ONE | {"key_value_heads": 3}, prompt=96, steps=3, budget=96),
)


def configs(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """Short windows, so that thoughts change often; max_tokens covers the longest trace.

    On a GPU, each shape has formats of its own, since each combination is compiled.
    """
    cpu = not torch.cuda.is_available()
    shapes = ((4, 2, 2, (2, 1)), (4, 3, 2, (1,)), (3, 2, 1, (3, 2, 1)), (4, 2, 2, (2, 0)))
    combinations = tuple(itertools.product((*shapes, (6, 4, 2, (4, 2))), FORMATS)) if cpu else (
        *zip(shapes, FORMATS, strict=True), ((128, 16, 8, (64, 32, 16, 8, 4)), FORMATS[1]),
    )
    return st.builds(
        lambda budget, combination, edges, threshold: {
            "budget": budget, **dict(zip(("tau", "group", "block", "retention"), combination[0], strict=True)),
            "formats": dict(zip("RET", combination[1].split(), strict=True)), "edges": edges,
            "sparsity_threshold": threshold, "sparsity_of": "mean" if budget % 2 else "heads",
            "max_tokens": 36 if cpu else 400,
        },
        st.integers(1, 2 * most), st.sampled_from(combinations),
        st.sampled_from(((0.2, 0.5), (0.0, 0.3), (0.4, 1.5), None)), st.sampled_from((0.3, 0.01)),
    )


def max_kept(state: Any, tokens: int) -> int:
    """The larger of the budget and the minimum of all earlier segments plus the current segment."""
    config = state.config
    segments = -(-tokens // config.tau) + 1
    return min(tokens, max(config.budget, config.retention[-1] * (segments - 1) + config.tau))


def poison(state: Any) -> None:
    """Poison the free memory of the cache."""
    thinkv_paging.poison(state.cache)


def bytes_of(state: Any) -> int:
    """Bytes of the tokens' codes and scales and of the full buffer, without tables, whose size does not depend on D."""
    _, heads, head_dim = state.cache.shape
    quantized = int((state.cache.groups >= 0).sum())
    buffer = 2 * state.sizes.batch * heads * state.config.group * head_dim * state.dtype.itemsize
    return int(state.cache.bits_per_element() * 2 * heads * head_dim * quantized / 8) + buffer


class Adapter(lockstep.Adapter):
    """The lockstep adapter; the module's docstring describes its checks."""

    stored = ("key", "value")
    exact = ("segments", "thought", "levels", "over_budget")

    def attach(self, tested: Any, reference: Any) -> None:
        self.tested, self.prompt, self.share = tested, 0, tested.sparsity.clone()
        self.read: list[Any] = []
        reference._attended = lambda query: self._snapshot(reference)
        reference._representatives = self._choose

    def contents(self, state: Any) -> dict[str, Tensor]:
        """Each of the attributes `key` and `value` of our states dequantizes both. So after the first comparison, both
        come from one call. In a quick run, every third step of our states is compared: what a step stores lasts."""
        if not type(state).__module__.startswith(OURS) or not any(state is one for one in self.read):
            self.read.append(state)
            return super().contents(state)
        if draws.is_quick() and type(self.tested).__module__.startswith(OURS) and state.tokens_seen % 3:
            return {}
        both = dict(zip(Adapter.stored, state.cache.dequantized(), strict=True)) if self.stored else {}
        return {name: both[name] for name in self.stored}

    def _snapshot(self, reference: Any) -> None:
        """Copy the reference's cache at attention, before the step quantizes and evicts tokens."""
        self.cache = copy.copy(reference.cache)
        self.cache._rows = copy.deepcopy(reference.cache._rows)

    def _choose(self, key: Tensor, slots: Tensor, keep: Tensor) -> Tensor:
        """`segment_representatives` with the tested module's `select_representatives`."""
        select = function_of(self.tested, "select_representatives")
        if select is None:
            return segment_representatives(key, slots, keep)
        keep_mask = slots >= 0
        for row, segment in keep_mask.any(-1).nonzero().tolist():
            members, count = slots[row, segment][keep_mask[row, segment]], int(keep[row, segment])
            if count == 0:
                keep_mask[row, segment] = False
                continue
            given = key[row][:, members].float()
            result = select(given, count)
            vectors = given.transpose(0, 1).flatten(1)
            assert_representatives_right(result, SimpleNamespace(keep=count, tokens=len(members), vectors=vectors))
            indices, _ = result
            keep_mask[row, segment] = torch.isin(torch.arange(slots.shape[-1], device=slots.device), indices)
        return keep_mask

    def reorder(self, index: Tensor) -> None:
        self.share = self.share[index]

    def before_slots(self, tested: Any, reference: Any, token: dict[str, Tensor]) -> Verdict | None:
        query, config = token["query"], reference.config
        allowed = thinkv_paging.arithmetic(self.cache, query.dtype)
        self.attention = thinkv_paging.attention_of(self.cache, query, reference.scale)
        key, _, _ = in_order(self.cache, torch.float64)
        wide = thinkv_paging.widen_logits(self.attention, query, key, allowed)
        self.bound = thinkv_paging.attention_error(wide, allowed)[:, :, 0]
        if (reference.tokens_seen - self.prompt - 1) % config.tau:
            assert_same(tested.sparsity, self.share, what="sparsity (unchanged in this step)")
            return None
        (low, high), _ = thinkv_paging.sparsity_interval(wide, allowed, config)
        self.share = tested.sparsity.clone()
        share = self.share.double()
        if not bool(((share >= low) & (share <= high)).all()):
            fail(f"sparsity: expected {low.tolist()} to {high.tolist()}, got {share.tolist()}")
        if config.edges is None:
            return None
        exact = torch.tensor(config.edges, dtype=torch.float64, device=share.device)
        edges = torch.cat((exact, exact.float().double()))                                    # kernels: float32
        open_ = ((low[:, None] <= edges) & (edges <= high[:, None])).any(1)
        if bool((tested.thought != reference.thought).any()):
            assert_same(tested.thought, reference.thought, where=~open_, what="thought")
            reference.thought = tested.thought.clone()
        return None

    def prefill(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        self.prompt = prompt["key"].shape[2]
        return super().prefill(tested, reference, prompt)

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        """The tables of the cache, and what they say of each block."""
        cache: Any = getattr(tested, "cache", None)
        expected = reference.cache
        if not hasattr(cache, "block_table"):
            return None
        for name in thinkv_paging.TABLES:
            found = getattr(cache, name).to(prompt["key"].device)
            assert_same(found, getattr(expected, name), what=f"cache.{name} after the prompt")
        for row in range(reference.sizes.batch):
            if list(cache.block_table(row)) != list(expected.block_table(row)):
                fail(f"cache.block_table({row}) after the prompt: expected {expected.block_table(row)}, got "
                     f"{cache.block_table(row)}")
        return None

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        return self.bound, None

    def reset(self) -> None:
        self.prompt, self.share = 0, torch.zeros_like(self.share)


def function_of(state: Any, name: str) -> Any:
    """A function of the module or package that defines a state's class; None if it has none."""
    if isinstance(state, host.OnHost):
        function = function_of(state.on_device, name)
        return None if function is None else host.calling(function, state.its_device)
    if hasattr(state, "function_of"):                                           # a state on several ranks
        return state.function_of(name)
    parts = type(state).__module__.split(".")
    for end in range(len(parts), 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if hasattr(module, name):
            return getattr(module, name)
    return None
