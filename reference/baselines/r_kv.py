"""R-KV: keep the tokens that the last queries attend to and that no other key repeats.

Paper: Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (2025, arXiv 2505.24133).
The tokens before an observation window compete. The importance of a token is its softmax weight among these tokens, of
the largest logit of a group's query heads, averaged over the queries of the window and smoothed by a max pool. The
redundancy of a token is a softmax over the mean cosine similarities of the keys. The score is lambda times the
importance minus (1 - lambda) times the redundancy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, accumulate_dtype, exact, softmax, sum_in_order
from ..blocks import Chunk, IntervalConfig
from ..contract.arguments import check_choice, check_flag, check_integer, check_kernel_size, check_ratio
from ..selection import order
from ..window import WindowedState

__all__ = ["RKVConfig", "RKVState"]

#: Added to the norm of a key, as in the authors' code.
EPSILON = 1e-8
#: The orders of the tokens: see `RKVConfig`.
ORDERS = ("position", "score")


@dataclass(frozen=True)
class RKVConfig(IntervalConfig):
    """Configuration of an R-KV cache.

    budget, block_size: see `BlockConfig`. window: the number of last tokens that observe and are kept, of which at most
    budget count. kernel_size: the width of the max pool, odd. mix_lambda: the share of the importance in the score,
    from 0 to 1. threshold: the cosine similarity above which two keys are similar, from 0 to 1. A token's mean
    similarity leaves out each token whose last similar token it is. exempts_first: whether the first token's mean also
    leaves out each token that is similar to none, as in the authors' code. order: the order of the tokens, in which one
    is the first, one of several similar ones is the last, and tokens are neighbours in the pool. "position": the oldest
    first. "score", the order of the authors' cache: first the tokens that were scored at the last eviction, the highest
    score first, then all others, the oldest first; equal scores too, the oldest first. Until the first eviction, the
    two are the same. interval: see `IntervalConfig`; the authors evict once in 128 steps. Raises TypeError or
    ValueError for invalid arguments.
    """

    window: int = 8
    kernel_size: int = 7
    mix_lambda: float = 0.1
    threshold: float = 0.5
    exempts_first: bool = True
    order: str = "position"
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("window", self.window, minimum=1)
        check_kernel_size(self.kernel_size)
        check_ratio("mix_lambda", self.mix_lambda)
        check_ratio("threshold", self.threshold)
        check_flag("exempts_first", self.exempts_first)
        check_choice("order", self.order, ORDERS)

    @property
    def observers(self) -> int:
        """The number of last tokens that observe and are protected."""
        return min(self.window, self.budget)


def unit_keys(key: Tensor, occupied: Tensor) -> Tensor:
    """k / (||k|| + EPSILON) [..., S, D] in accumulate_dtype, 0 where unoccupied.

    Keys are first divided by their largest element: the squares of float32 numbers overflow and underflow.
    """
    key = key.masked_fill(~occupied[..., None], 0).to(accumulate_dtype(key))
    largest = key.abs().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1)
    scaled = key / largest
    return scaled / (scaled.norm(dim=-1, keepdim=True) + EPSILON / largest)


def redundancy(
    key: Tensor, occupied: Tensor, positions: Tensor, *, threshold: float, exempts_first: bool
) -> Tensor:
    """R_j of the n tokens of each KV head, [B, Hkv, S]: a softmax of their mean similarities; 0 where unoccupied.

    positions [B, Hkv, S] int64, at least 0: of the tokens, or their places in another order. m_j is the mean of C_ij
    over the tokens i, where C_ij is 0 for i = j; for the last token j with C_ij > threshold; and, if there is none and
    with exempts_first, for the first token j.
    """
    unit = unit_keys(key, occupied)
    with exact(unit):
        similar = unit @ unit.transpose(-1, -2)              # C, [B, Hkv, S, S]: 0, not above any threshold, where free
    similar.diagonal(dim1=-2, dim2=-1).zero_()
    by_age = positions.argsort(-1)
    age = by_age.argsort(-1)[..., None, :]                                               # [B, Hkv, 1, S]
    above = torch.gt(similar, threshold, out=torch.empty_like(similar))                  # 1 or 0, faster than bools
    latest = above.mul_(age + 1).amax(-1, keepdim=True).long() - 1                       # of row i, [B, Hkv, S, 1]
    place = by_age[..., None].gather(-2, latest.clamp_min(0))
    first = positions.masked_fill(~occupied, torch.iinfo(positions.dtype).max).argmin(-1)[..., None, None]
    place = torch.where(latest >= 0, place, first)
    exempt = (latest >= 0) | exempts_first
    similar.scatter_(-1, place, similar.gather(-1, place).masked_fill(exempt, 0))
    count = occupied.sum(-1, keepdim=True).clamp_min(1)
    mean = similar.sum(-2) / count                                                       # m_j
    return softmax(mean.masked_fill(~occupied, -INF))


class RKVState(WindowedState):
    """An R-KV cache, see `BlockState`.

    After a block or decode step, a KV head of a row with at least budget + interval tokens is due: it scores its tokens
    and evicts down to the budget. `score` is the score at the last time, +inf for tokens that were in the window then
    or came later. The number of tokens decides, not the number of steps, so rows with padding evict at other steps than
    rows without.
    """

    Config = RKVConfig

    def _observe(self, chunk: Chunk) -> None:
        config, logit = self.config, self._observe_window(chunk)
        is_new = torch.arange(self.sizes.slots, device=self.device) >= config.capacity
        score = self.score.masked_fill(is_new, INF)
        self._earlier = score                                            # the conformance suite reads it, too
        due = self._due()
        if bool(due.any()):
            score = torch.where(due, self._mixed(logit, config.capacity + chunk.query.shape[2]), score)
        self.score.copy_(score.masked_fill(~self.occupied, -INF))

    def _mixed(self, logit: Tensor, end: int) -> Tensor:
        """The scores, [B, Hkv, S]; +inf in the window. logit [B, Hkv, G, W, S]; slots from `end` on are free."""
        config, places = self.config, self._places()
        prefix = self.occupied & ~self._in_window()
        repeated = redundancy(
            self.key[:, :, :end], self.occupied[..., :end], places[..., :end], threshold=config.threshold,
            exempts_first=config.exempts_first,
        )
        repeated = functional.pad(repeated, (0, self.sizes.slots - end))
        score = config.mix_lambda * self._importance(logit, prefix, places) - (1 - config.mix_lambda) * repeated
        return score.masked_fill(~prefix, INF)

    def _places(self) -> Tensor:
        """The place of each token in the order, [B, Hkv, S] int64. Free slots come first, the window last."""
        place = order(self.positions)
        if self.config.order == "position":
            return place
        # As topk leaves them: the highest score first. The last window and newer tokens, not scored (+inf), follow.
        lowest = (-self._earlier).masked_fill(self._earlier == INF, INF).masked_fill(~self.occupied, -INF)
        by_age = torch.empty_like(lowest).scatter(-1, place, lowest)
        return order(by_age).gather(-1, place)

    def _importance(self, logit: Tensor, prefix: Tensor, places: Tensor) -> Tensor:
        """The importance of the tokens of prefix [B, Hkv, S] bool, pooled along `places`: [B, Hkv, S]."""
        largest = logit.amax(2)                                                          # [B, Hkv, W, S]
        asks = (self._window_positions >= 0)[:, None, :, None]
        weight = softmax(largest.masked_fill(~(prefix[:, :, None] & asks), -INF))
        received = sum_in_order(weight, 2) / asks.sum(2).clamp_min(1)                     # I, [B, Hkv, S]
        in_order = torch.full_like(received, -INF).scatter(-1, places, received.masked_fill(~prefix, -INF))
        size = self.config.kernel_size
        return functional.max_pool1d(in_order, size, stride=1, padding=size // 2).gather(-1, places)

    def _in_window(self) -> Tensor:
        """[B, Hkv, S] bool."""
        return self.positions >= self._seen - self.config.observers

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self.occupied & self._in_window()
