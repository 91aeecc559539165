"""EpiKV's hybrids of attention and hidden states, Attn x HS and Segment-HS (table 1, section 4.3).

The paper describes each with one line of a table, "cumul. attn + z_10" and "ThinKV seg. + HS rank", and says that the
second combines segment classification with the hidden-state ranker. We read them as follows:

- attn_x_hs: the score of token j is A_j + z_10(j), the sum in the table, not the product that the name suggests (claim
  EK-11d). z_10 is the causal z-score of band A, computed when the token arrives (section 3.3). A_j is H2O's sum: the
  weights that token j received from all queries since its own, which is included. It grows as long as j is cached.
  Neither term is normalized, since the paper mentions no normalization.
- segment_hs: each token has the thought type of its segment, transition T, execution E or reasoning R. As in ThinKV
  (section 3.1.3), the sparsity of attention at the first decode step of a segment, compared with two edges, determines
  the type of `tau` decode steps; the prompt is reasoning. Tokens of the least important type are evicted first, T
  before E before R (ThinKV observation 2); within a type, those with the lowest EpiKV score z_10 - z_21 (eq. 3),
  whatever the age of their segment. ThinKV's budgets per segment (64, 32 and 8 tokens in appendix D) are not used: with
  them, fewer than K tokens may remain, for which appendix D criticizes ThinKV; the policies here fill the budget.
- segment_hs with segments_by="entropy": table 1 names "segment entropy" as ThinKV's signal, and section 5 calls it
  attention entropy. We take the entropy of each query head's weights over the n cached tokens, -sum_j a_j log a_j,
  relative to its largest value log n, averaged over the heads. Sparse attention has a low entropy, so the types are in
  reverse: transition below theta_1, reasoning below theta_2, otherwise execution. Like the sparsity, it is between 0
  and 1, whatever n. Where the cache is full, n is constant and log n is only the unit of the edges.

One score serves all layers and heads, as for every policy that reads hidden states: appendix H moves keep masks to the
device of each tensor, so all layers share one mask. Hence A_j is averaged over the query heads and over the layers that
share a scorer. So are the entropy and the sparsity, which ThinKV averages over calibrated layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._rows import Rows
from ..attention import sum_in_order
from ..contract.thinkv.types import Thought
from ..selection import victims
from ..thinkv.thoughts import classify, share_skipped

REASONING = int(Thought.REASONING)


def received(weight: Tensor) -> Tensor:
    """The attention that each token receives, averaged over query heads: [B, S].

    weight [B, Hq, S] of a step, or [B, Hq, T, S] of a prompt, whose queries are summed.
    """
    mean = sum_in_order(weight, 1) / weight.shape[1]
    return mean if weight.dim() == 3 else sum_in_order(mean, 1)


def relative_entropy(weight: Tensor, occupied: Tensor) -> Tensor:
    """The entropy of each query head's weights over its largest value, log n for n tokens, averaged over heads: [B].

    weight [B, Hq, S]; occupied [B, S] bool. From 0 to 1; 0 for a row of one token.
    """
    entropy = -torch.xlogy(weight, weight).sum(-1).mean(1)
    tokens = occupied.sum(-1).to(weight.dtype)
    return torch.where(tokens > 1, entropy / tokens.clamp_min(2).log(), 0)


def classify_entropy(entropy: Tensor, edges: tuple[float, float]) -> Tensor:
    """The thought type for a relative entropy [B]: transition below theta_1, reasoning below theta_2, otherwise
    execution, also for NaN. Compare `kvtwin.reference.thinkv.classify`."""
    low, high = edges
    thought = torch.where(entropy < high, int(Thought.REASONING), int(Thought.EXECUTION))
    return torch.where(entropy < low, int(Thought.TRANSITION), thought)


class Attention(Rows):
    """The attention statistics of a scorer, for S slots per row.

    aggregate [B, S]: A_j, 0 in free slots. frozen [B, S]: the part of the score that does not change. thoughts [B, S]
    int64: the thought type of each token, -1 in free slots. thought [B] int64: the thought type of the current segment.
    """

    _per_row = ("aggregate", "frozen", "thoughts", "thought")
    _of_all_rows = ("_decoded",)

    def __init__(
        self, score: Tensor, tau: int, edges: tuple[float, float] | None, threshold: float, segments_by: str
    ) -> None:
        self._tau, self._edges, self._threshold, self._by_entropy = tau, edges, threshold, segments_by == "entropy"
        self.aggregate = torch.zeros_like(score)
        self.frozen = score.clone()
        self.thoughts = torch.full_like(score, -1, dtype=torch.int64)
        self.thought = torch.full_like(score[:, 0], REASONING, dtype=torch.int64)
        self._decoded = 0
        self._layers: list[Tensor] = []         # one [B, S] or [B] per layer that attended at this step

    def record(self, weight: Tensor, occupied: Tensor, key_value_heads: int) -> None:
        """Record a layer's attention at a step: weight [B, Hq, S] over occupied [B, S], which includes the new token.
        """
        if self._edges is None:
            self._layers.append(received(weight))
        elif self._by_entropy:
            self._layers.append(relative_entropy(weight, occupied))
        else:
            self._layers.append(share_skipped(weight, occupied, key_value_heads, self._threshold))

    def admit(self, kept: Tensor, frozen: Tensor, aggregate: Tensor | None) -> None:
        """The prompt tokens `kept` [B, N] take slots 0 to N - 1, with their scores `frozen` and `aggregate` [B, N]."""
        count = kept.shape[1]
        self.frozen[:, :count] = frozen
        if aggregate is not None:
            self.aggregate[:, :count] = aggregate.masked_fill(kept < 0, 0)
        self.thoughts[:, :count] = torch.where(kept < 0, -1, REASONING)

    def step(self, slot: Tensor, frozen: Tensor) -> None:
        """Add the new token, in `slot` [B, 1] with the score `frozen` [B], after all layers attended."""
        total = self._layers[0]
        for layer in self._layers[1:]:
            total = total + layer
        mean, self._layers = total / len(self._layers), []
        if self._edges is None:
            self.aggregate = self.aggregate.scatter(1, slot, 0) + mean
        elif self._decoded % self._tau == 0:
            self.thought = (classify_entropy if self._by_entropy else classify)(mean, self._edges)
        self.frozen = self.frozen.scatter(1, slot, frozen[:, None])
        self.thoughts = self.thoughts.scatter(1, slot, self.thought[:, None])
        self._decoded += 1

    def score(self, occupied: Tensor) -> Tensor:
        """The scores [B, S], -inf in free slots."""
        return (self.aggregate + self.frozen).masked_fill(~occupied, -torch.inf)


def by_thought(order: Tensor, thoughts: Tensor) -> Tensor:
    """Sort slots, which are in an order of eviction [B, S], by their thoughts [B, S], the least important first."""
    return order.gather(1, victims(thoughts.gather(1, order), order.shape[1]))
