"""H2O: keep the tokens with the largest attention weights, summed over all queries so far.

Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (2023, arXiv
2306.14048). LongFlow section 4.1 splits the budget evenly between these heavy hitters and the most recent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention import sum_in_order
from ..blocks import AttendResult, BlockState, Chunk, IntervalConfig, attention_of_block, group_mean
from ..contract.blocks import check_protected

__all__ = ["AttendResult", "H2OConfig", "H2OState", "attend"]


@dataclass(frozen=True)
class H2OConfig(IntervalConfig):
    """Configuration of an H2O cache.

    budget, block_size: see `BlockConfig`. recent: the number of newest tokens that are protected, by default
    budget // 2. sinks: the number of first tokens that are never evicted, padding not counted. recent + sinks is at
    most budget. interval: see `IntervalConfig`. Raises TypeError or ValueError for invalid arguments.
    """

    recent: int | None = None
    sinks: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_protected(self.recent, self.sinks, self.budget)

    @property
    def protected(self) -> int:
        """The number of newest tokens that are protected."""
        return self.budget // 2 if self.recent is None else self.recent


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> AttendResult:
    """Attention of the tokens in the last Q slots; received = the sum of each key's weights over the block's queries.

    query [B, Hq, Q, D], causal within the block; key, value [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool; scale
    defaults to D ** -0.5. Returns output [B, Hq, Q, D] in query's dtype, zeros at unoccupied slots, and received
    [B, Hkv, S], the mean over the G query heads of a KV head. TypeError or ValueError for invalid arguments.
    key and value may both be FP8 (torch.float8_e4m3fn or torch.float8_e5m2) with a query of another dtype. They stand
    for key * key_scale and value * value_scale: float32 tensors, of all heads [] or of each KV head [Hkv], above 0;
    None is 1. Scales are checked if they are on the CPU. Outputs must fit in query's dtype.
    """
    output, weight = attention_of_block(                                                # weight [B, Hkv, Q, S]
        query, key, value, occupied, scale=scale, key_scale=key_scale, value_scale=value_scale
    )
    return AttendResult(output, sum_in_order(weight, 2))


class H2OState(BlockState):
    """An H2O cache, see `BlockState`. `score` is the sum of each token's weights over all queries since its own, which
    is included. With an interval, sums go on between evictions."""

    Config = H2OConfig

    def _observe(self, chunk: Chunk) -> None:
        self.score += sum_in_order(group_mean(chunk.weight, self.sizes.key_value_heads), 2)

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self._newest(self.config.protected) | self._oldest(self.config.sinks)
