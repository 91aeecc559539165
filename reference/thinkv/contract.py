"""What both sides of ThinKV share: config, result types and the checks of arguments. No mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import MethodConfig, check_choice, check_integer

#: The element formats with their bits per code (section 3.2 and D.3; int4 and int2 are the ablation of E.8).
BITS = MappingProxyType({"fp8": 8, "nvfp4": 4, "ternary": 2, "int4": 4, "int2": 2})
SCALE_RULES = ("amax", "mse")


class Thought(IntEnum):
    """The thought types, in the paper's numbering (D.6), which is also their order of importance (observation 2)."""

    TRANSITION = 0
    EXECUTION = 1
    REASONING = 2


#: How `ThinKVConfig.formats` names them.
LETTERS = MappingProxyType({"T": Thought.TRANSITION, "E": Thought.EXECUTION, "R": Thought.REASONING})


class Quantized(NamedTuple):
    """A tensor in a low-bit format.

    codes: uint8, one code per element, in the shape of what was quantized [..., T, D] (`pack` makes them small).
    scales: uint8, the bits of E4M3 numbers, [..., ceil(T / group), D] for axis -2 and [..., T, ceil(D / group)] for
    axis -1; float32 [..., ceil(T / group)] for fp8, whose scale covers a chunk of `group` tokens with all channels.
    fmt, axis, group, shape: what `quantize` was asked for, axis as -1 or -2. tensor_scale: the second-level float32
    scale (a scalar tensor), None where there is none.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    axis: int
    group: int
    shape: torch.Size
    tensor_scale: Tensor | None = None


class Thresholds(NamedTuple):
    """What calibration finds: the layers L* whose sparsity tells thoughts apart, and (theta_1, theta_2)."""

    layers: tuple[int, ...]
    edges: tuple[float, float]


class PagedAttentionResult(NamedTuple):
    """One decode step over a paged cache.

    output: [B, Hq, D] in query's dtype. sparsity: [B] float32 (float64 in the oracle), see `attention_sparsity`; NaN
    for a row that was not looked at.
    """

    output: Tensor
    sparsity: Tensor


class AnnealResult(NamedTuple):
    """What an eviction leaves of each segment.

    size: [B, M] int64, live tokens per segment. level: [B, M] int64, how often each was selected so far.
    over_budget: [B] bool, the floors of the segments hold more than the budget.
    """

    size: Tensor
    level: Tensor
    over_budget: Tensor


class RepresentativesResult(NamedTuple):
    """The tokens that stand for a segment.

    indices: [keep] int64, ascending, distinct. assignments: [iterations, size] int64, the cluster of every token after
    each Lloyd iteration's assignment step.
    """

    indices: Tensor
    assignments: Tensor


@dataclass(frozen=True)
class ThinKVConfig(MethodConfig):
    """How a ThinKV cache quantizes and evicts.

    budget: live tokens per row that eviction aims at; the floor of 4 tokens per segment wins over it (`over_budget`).
    tau: decode steps between two looks at the sparsity, the length of a segment (section 3.1.3).
    group: tokens (keys) or channels (values) that share a scale, and the size of the full-precision buffer.
    block: tokens per physical block. retention: how many tokens a segment keeps when it is selected for the first,
    second, ... time (section 3.3.2), decreasing. formats: the element format of each thought type, R, E and T.
    edges: (theta_1, theta_2) of the sparsity, see `classify`; None: the caller writes `state.thought`, which is
    reasoning until then. sparsity_threshold: the share of the row's largest weight below which a token counts as not
    attended to. max_tokens: the longest sequence, prompt and decoded tokens, that a state has room for.
    scale: the factor on query . key, default head_dim ** -0.5. Raises TypeError or ValueError for anything else.
    """

    budget: int = 1024
    tau: int = 128
    group: int = 16
    block: int = 8
    retention: tuple[int, ...] = (64, 32, 16, 8, 4)
    formats: Mapping[str, str] = field(
        default_factory=lambda: {"R": "nvfp4", "E": "nvfp4", "T": "ternary"}, hash=False
    )
    edges: tuple[float, float] | None = None
    sparsity_threshold: float = 0.01
    max_tokens: int = 32768

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "group", "block", "max_tokens"):
            check_integer(name, getattr(self, name), minimum=1)
        object.__setattr__(self, "retention", check_retention(self.retention))
        object.__setattr__(self, "formats", check_formats(self.formats))
        if self.edges is not None:
            object.__setattr__(self, "edges", check_edges(self.edges))
        check_share("sparsity_threshold", self.sparsity_threshold)

    def format_of(self, thought: int) -> str:
        """The element format of a thought type's tokens."""
        return self.formats[Thought(thought).name[0]]

    @property
    def segments(self) -> int:
        """The most segments that a sequence of max_tokens has: the prompt's, cut at tau, then one per window."""
        return ceil(self.max_tokens / self.tau) + 1

    @property
    def peak(self) -> int:
        """The most live tokens that there are at any moment: a segment of tau tokens comes before eviction looks."""
        return min(self.max_tokens, max(self.budget, self.retention[-1] * self.segments + self.tau) + self.tau)

    @property
    def blocks_per_thought(self) -> int:
        """Blocks that one thought type can come to hold: its peak, a partly filled block, and one in hand."""
        return ceil(self.peak / self.block) + 2

    @property
    def blocks(self) -> int:
        """Entries in a sequence's block table."""
        return len(Thought) * self.blocks_per_thought

    @property
    def slots(self) -> int:
        """S: the slots of the block table, then the buffer's."""
        return self.blocks * self.block + self.group


def check_retention(value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not value:
        raise TypeError(f"retention must be a tuple of ints, got {value!r}")
    for number, keep in enumerate(value):
        check_integer(f"retention[{number}]", keep, minimum=1)
    if any(later > earlier for earlier, later in pairwise(value)):
        raise ValueError(f"retention must not increase, got {tuple(value)}")
    return tuple(value)


def check_formats(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"formats must be a mapping of R, E and T to formats, got {type(value).__name__}: {value!r}")
    if set(value) != set(LETTERS):
        raise ValueError(f"formats must name R, E and T, got {sorted(map(str, value))}")
    return {letter: check_format(f"formats[{letter!r}]", value[letter]) for letter in LETTERS}


def check_format(name: str, value: object) -> str:
    return check_choice(name, value, tuple(BITS))


def check_share(name: str, value: object) -> float:
    """A number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}: {value!r}")
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return float(value)


def check_edges(value: object) -> tuple[float, float]:
    """(theta_1, theta_2): two numbers in ascending order."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"edges must be (theta_1, theta_2), got {value!r}")
    for number, edge in enumerate(value):
        if isinstance(edge, bool) or not isinstance(edge, (int, float)):
            raise TypeError(f"edges[{number}] must be a float, got {type(edge).__name__}: {edge!r}")
    if not value[0] <= value[1]:
        raise ValueError(f"edges must ascend, got {tuple(value)}")
    return float(value[0]), float(value[1])
