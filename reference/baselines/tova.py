"""TOVA: after each block, keep the tokens with the largest weights from the newest query.

Paper: Oren et al., "Transformers are Multi-State RNNs" (2024, arXiv 2401.06104).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import INF, logsumexp_in_order, per_kv_head, sum_in_order, with_sinks
from ..blocks import AttendResult, BlockState, Chunk, IntervalConfig, attention_of_block, group_mean
from ..contract.arguments import check_flag

__all__ = ["AttendResult", "TOVAConfig", "TOVAState", "attend"]


@dataclass(frozen=True)
class TOVAConfig(IntervalConfig):
    """Configuration of a TOVA cache. budget, block_size: see `BlockConfig`. interval: see `IntervalConfig`. No token is
    protected. per_head: each KV head chooses by the average over its query heads; if False, all KV heads keep the same
    tokens, by the average over all query heads, as in the authors' code. Raises TypeError or ValueError for invalid
    arguments."""

    interval: int = 1
    per_head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("per_head", self.per_head)


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> AttendResult:
    """Attention of the tokens in the last Q slots; received = each key's weight from the newest query.

    Arguments, output and errors as in `h2o.attend`. The newest query belongs to the last occupied one of the last Q
    slots; if all of them are unoccupied, received is 0.
    """
    output, weight = attention_of_block(                                                # weight [B, Hkv, Q, S]
        query, key, value, occupied, scale=scale, key_scale=key_scale, value_scale=value_scale
    )
    count = query.shape[2]
    valid = per_kv_head(occupied)[..., -count:].expand(-1, weight.shape[1], -1)         # [B, Hkv, Q]
    return AttendResult(output, _of_newest(weight, valid))


def _of_newest(tensor: Tensor, valid: Tensor) -> Tensor:
    """tensor [B, H, Q, S] at the last query of each head for which `valid` [B, H, Q] is True, or at query 0: [B, H, S].
    """
    number = torch.arange(valid.shape[-1], device=valid.device)
    newest = number.where(valid, -1).amax(-1).clamp_min(0)                              # [B, H]
    index = newest[..., None, None].expand(-1, -1, 1, tensor.shape[-1])
    return tensor.gather(2, index)[:, :, 0]


class TOVAState(BlockState):
    """A TOVA cache, see `BlockState`. `score` is each token's weight from the newest query, also between evictions.
    Tokens are ranked by its logarithm, which does not underflow."""

    Config = TOVAConfig

    def _observe(self, chunk: Chunk) -> None:
        heads = self.sizes.key_value_heads
        valid = chunk.valid[:, None].expand(-1, self.sizes.query_heads, -1)             # [B, Hq, Q]
        weight = group_mean(_of_newest(chunk.weight, valid), heads)                     # [B, Hkv, S]
        logit = _of_newest(chunk.logit, valid)                                          # [B, Hq, S]
        lse = with_sinks(logit, self.sink_logits).logsumexp(-1, keepdim=True)
        lse = lse.masked_fill(lse == -INF, 0)
        self._log_score = logsumexp_in_order((logit - lse).unflatten(1, (heads, -1)), 2)  # log sum_h a_hj
        if not self.config.per_head:
            weight = (sum_in_order(weight, 1)[:, None] / heads).expand_as(weight)
            self._log_score = logsumexp_in_order(self._log_score, 1)[:, None].expand_as(weight)
        has_query = chunk.valid.any(-1)[:, None, None]
        self.score.copy_(torch.where(has_query, weight, self.score).masked_fill(~self.occupied, -INF))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self._log_score, torch.zeros_like(self.occupied)
