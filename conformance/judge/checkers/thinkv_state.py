"""ThinKV's state judged, step by step: attention and sparsity within their bounds, what is stored to the letter.

Which tokens stay of a segment that shrinks, k-means decides, and a legal tie early in it changes all that follows. So
the reference takes its choices from the side under test: from that module's `select_representatives`, on the very keys
that the segment has, each result judged round by round. What the tested state then holds must be just that. A thought
type may differ where the sparsity's interval contains an edge: the reference adopts it.
"""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.thinkv.eviction import segment_representatives
from ....reference.thinkv.paging import in_order
from .. import lockstep
from ..compare import Verdict, assert_same, fail
from . import thinkv_paging
from .thinkv_eviction import assert_representatives_right

#: Windows of two tokens, so that something ends at every other step. On a GPU, graphs replay many steps.
SMALL = {
    "tau": 2, "group": 2, "block": 2, "retention": (1,), "edges": (0.2, 0.5), "sparsity_threshold": 0.3,
    "max_tokens": 160 if torch.cuda.is_available() else 24,
}
LOSSY = True
#: The reference goes token by token, in Python: on a GPU with a launch for all that it does.
LONGEST = (140, 24)
FORMATS = ("nvfp4 nvfp4 ternary", "fp8 nvfp4 ternary", "int4 int4 int2")
COMPILED = tuple(
    {"formats": dict(zip("RET", formats.split(), strict=True)), **sizes}
    for formats, sizes in (
        *((formats, {}) for formats in FORMATS[1:]),
        *((formats, {"tau": 16, "group": 16, "block": 8}) for formats in (FORMATS[0], "nvfp4 int4 int2")),
    )
)


def configs(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """Short windows, so that thoughts come and go; room for the longest trace."""
    cpu = not torch.cuda.is_available()
    shapes = ((4, 2, 2, (2, 1)), (4, 3, 2, (1,)), (3, 2, 1, (3, 2, 1)), (6, 4, 2, (4, 2)))
    return st.builds(
        lambda budget, shape, formats, edges, threshold: {
            "budget": budget, **dict(zip(("tau", "group", "block", "retention"), shape, strict=True)),
            "formats": dict(zip("RET", formats.split(), strict=True)), "edges": edges,
            "sparsity_threshold": threshold, "max_tokens": 36 if cpu else 400,
        },
        st.integers(1, 2 * most), st.sampled_from(shapes if cpu else (*shapes, (128, 16, 8, (64, 32, 16, 8, 4)))),
        st.sampled_from(FORMATS), st.sampled_from(((0.2, 0.5), (0.0, 0.3), (0.4, 1.5), None)),
        st.sampled_from((0.3, 0.01)),
    )


def most_held(state: Any, tokens: int) -> int:
    """The floors of all earlier segments, or the budget, and the segment that is being written."""
    config = state.config
    segments = -(-tokens // config.tau) + 1
    return min(tokens, max(config.budget, config.retention[-1] * (segments - 1) + config.tau))


def poison(state: Any) -> None:
    """What no token of the cache is in, spoiled."""
    thinkv_paging.poison(state.cache)


def bytes_of(state: Any) -> int:
    """Codes and scales of the tokens, and the buffer at its full size; the tables are as large for any head_dim."""
    _, heads, head_dim = state.cache.shape
    quantized = int((state.cache.groups >= 0).sum())
    buffer = 2 * state.sizes.batch * heads * state.config.group * head_dim * state.dtype.itemsize
    return int(state.cache.bits_per_element() * 2 * heads * head_dim * quantized / 8) + buffer


class Adapter(lockstep.Adapter):
    """See the module."""

    stored = ("key", "value")
    exact = ("segments", "thought", "levels", "over_budget")

    def attach(self, tested: Any, reference: Any) -> None:
        self.tested, self.prompt, self.share = tested, 0, tested.sparsity.clone()
        reference._attended = lambda query: self._look(reference)
        reference._representatives = self._choose

    def _look(self, reference: Any) -> None:
        """The reference's cache as attention saw it, before the step's tokens were quantized and evicted."""
        self.cache = copy.copy(reference.cache)
        self.cache._rows = copy.deepcopy(reference.cache._rows)

    def _choose(self, key: Tensor, slots: Tensor, keep: Tensor) -> Tensor:
        """Like `segment_representatives`, as the tested side has it."""
        select = function_of(self.tested, "select_representatives")
        if select is None:
            return segment_representatives(key, slots, keep)
        stays = slots >= 0
        for row, segment in stays.any(-1).nonzero().tolist():
            held, count = slots[row, segment][stays[row, segment]], int(keep[row, segment])
            given = key[row][:, held].float()
            result = select(given, count)
            vectors = given.transpose(0, 1).flatten(1)
            assert_representatives_right(result, SimpleNamespace(keep=count, tokens=len(held), vectors=vectors))
            indices, _ = result
            stays[row, segment] = torch.isin(torch.arange(slots.shape[-1], device=slots.device), indices)
        return stays

    def reorder(self, index: Tensor) -> None:
        self.share = self.share[index]

    def before_slots(self, tested: Any, reference: Any, token: dict[str, Tensor]) -> Verdict | None:
        query, config = token["query"], reference.config
        allowed = thinkv_paging.arithmetic(self.cache, query.dtype)
        self.attention = thinkv_paging.attention_of(self.cache, query, reference.scale)
        key, _, _ = in_order(self.cache, torch.float64)
        wide = thinkv_paging.widened(self.attention, query, key, allowed)
        self.bound = thinkv_paging.attention_error(wide, allowed)[:, :, 0]
        if (reference.tokens_seen - self.prompt - 1) % config.tau:
            assert_same(tested.sparsity, self.share, what="sparsity, at which nobody looks in this step,")
            return None
        (low, high), _ = thinkv_paging.sparsity_interval(wide, allowed, config.sparsity_threshold)
        self.share = tested.sparsity.clone()
        share = self.share.double()
        if not bool(((share >= low) & (share <= high)).all()):
            fail(f"sparsity: expected between {low.tolist()} and {high.tolist()}, got {share.tolist()}")
        if config.edges is None:
            return None
        exact = torch.tensor(config.edges, dtype=torch.float64, device=share.device)
        edges = torch.cat((exact, exact.float().double()))                                    # a kernel has float32
        open_ = ((low[:, None] <= edges) & (edges <= high[:, None])).any(1)
        if bool((tested.thought != reference.thought).any()):
            assert_same(tested.thought, reference.thought, where=~open_, what="thought")
            reference.thought = tested.thought.clone()
        return None

    def prefill(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        self.prompt = prompt["key"].shape[2]
        return super().prefill(tested, reference, prompt)

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        return self.bound, None

    def reset(self) -> None:
        self.prompt, self.share = 0, torch.zeros_like(self.share)


def function_of(state: Any, name: str) -> Any:
    """A function of the module, or package, that a state's class comes from; None if there is none."""
    parts = type(state).__module__.split(".")
    for end in range(len(parts), 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if hasattr(module, name):
            return getattr(module, name)
    return None
