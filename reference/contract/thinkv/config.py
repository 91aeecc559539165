"""ThinKV's config. `types` has the other types that both sides share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from .. import MethodConfig
from ..arguments import check_integer, check_share
from .arguments import check_edges, check_formats, check_retention, check_sparsity_of
from .types import Thought


@dataclass(frozen=True)
class ThinKVConfig(MethodConfig):
    """Configuration of a ThinKV cache.

    budget: the number of live tokens per row that eviction aims at. Each segment keeps at least retention[-1] tokens,
    even if that exceeds the budget (`over_budget`).
    tau: decode steps per segment; the sparsity is measured at the first step of each (section 3.1.3).
    group: the number of tokens (keys) or channels (values) that share a scale, and the size of the full-precision
    buffer.
    block: tokens per physical block.
    retention: how many tokens a segment keeps when it is selected for the first, second, ... time (section 3.3.2); a
    tuple that does not increase. If its last number is 0, segments can be evicted wholly (an ablation in section 5.3).
    formats: the element format of each thought type, R, E and T. "unquantized" keeps keys and values as they are, in 16
    bits, as in the paper's ablations without quantization ("w/o TBQ" and "TBE" in tables 2 and 3). float32 numbers keep
    their 32 bits.
    edges: (theta_1, theta_2) of the sparsity, see `classify`. None: the caller assigns `state.thought`, which is
    reasoning by default.
    sparsity_threshold: the share of a row's largest weight below which a token counts as not attended to.
    max_tokens: the longest sequence that a state can hold, prompt and decoded tokens.
    sparsity_of: "heads" averages the sparsities of a layer's KV heads, "mean" takes the sparsity of their average
    weights, see `attention_sparsity`.
    scale: the factor on query . key, by default head_dim ** -0.5.
    Raises TypeError or ValueError for invalid arguments.
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
    sparsity_of: str = "heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "group", "block", "max_tokens"):
            check_integer(name, getattr(self, name), minimum=1)
        object.__setattr__(self, "retention", check_retention(self.retention))
        object.__setattr__(self, "formats", check_formats(self.formats))
        if self.edges is not None:
            object.__setattr__(self, "edges", check_edges(self.edges))
        check_share("sparsity_threshold", self.sparsity_threshold)
        check_sparsity_of(self.sparsity_of)

    def format_of(self, thought: int) -> str:
        """The element format of the tokens of a thought type."""
        return self.formats[Thought(thought).name[0]]

    @property
    def segments(self) -> int:
        """M: the largest number of segments in max_tokens tokens. The prompt is cut every tau tokens."""
        return ceil(self.max_tokens / self.tau) + 1

    @property
    def peak(self) -> int:
        """The largest number of live tokens at any time: a segment of tau tokens arrives before the next eviction."""
        return min(self.max_tokens, max(self.budget, self.retention[-1] * self.segments + self.tau) + self.tau)

    @property
    def blocks_per_thought(self) -> int:
        """The largest number of blocks of one thought type: for `peak` tokens, a partly filled block and a spare one.
        """
        return ceil(self.peak / self.block) + 2

    @property
    def blocks(self) -> int:
        """The number of entries in a sequence's block table."""
        return len(Thought) * self.blocks_per_thought

    @property
    def slots(self) -> int:
        """S: the slots of the block table, followed by those of the buffer."""
        return self.blocks * self.block + self.group


def pool_blocks(config: ThinKVConfig, fmt: str) -> int:
    """The number of physical blocks of a format per sequence: those of all thought types stored in this format."""
    return config.blocks_per_thought * sum(config.format_of(thought) == fmt for thought in Thought)
