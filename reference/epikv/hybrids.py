"""EpiKV's hybrids of attention and hidden states, Attn x HS and Segment-HS (table 1, section 4.3).

The paper has a line of a table for each, "cumul. attn + z_10" and "ThinKV seg. + HS rank", and says of the second that
it combines segment classification with the hidden-state ranker. Our reading, each time the plainest that is whole:

- attn_x_hs: the score of token j is A_j + z_10(j), a sum as the table says and not the product of the name (claim
  EK-11d). z_10 is the causal z-score of band A alone, frozen when the token comes (section 3.3). A_j is what H2O adds
  up, the weights that queries gave j since it came, its own query's included, so it grows as long as j is held. Neither
  is normalised, since nothing of that sort is said.
- segment_hs: a token has the thought type of its segment, transition T, execution E or reasoning R, as ThinKV tells it:
  the sparsity of the attention of a segment's first decode step, against two edges, for `tau` decode steps (ThinKV
  section 3.1.3); a prompt is reasoning. Tokens of the least important type go first, T before E before R (ThinKV
  observation 2), within a type those of the lowest score z_10 - z_21, EpiKV's (eq. 3), however old their segment is.
  ThinKV's own budgets per segment (64, 32 and 8 tokens in appendix D) are not kept: with them fewer than K tokens may
  stay, which appendix D holds against ThinKV, while policies here fill the budget.

One score serves all layers and heads, as for every policy that reads hidden states: appendix H has keep-masks moved to
the device of each tensor, so one mask for all layers. Hence A_j is the mean over the query heads, and over the layers
that share a scorer; so is the sparsity (ThinKV averages it over calibrated layers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..selection import victims
from ..thinkv.types import Thought
from ..thinkv.thoughts import classify, sparsity_of

REASONING = int(Thought.REASONING)


def received(weight: Tensor) -> Tensor:
    """What a step's query gave each token, the mean over query heads: weight [B, Hq, S] -> [B, S]; of a prompt's
    queries, [B, Hq, T, S], the sum over them."""
    return weight.mean(1) if weight.dim() == 3 else weight.mean(1).sum(1)


class Attention:
    """What a scorer remembers of attention, for S slots of each row.

    aggregate [B, S]: A_j, 0 in free slots. frozen [B, S]: the part of the score that does not change. thoughts [B, S]
    int64: the thought type of each token, -1 in free slots. thought [B] int64: that of the segment that is coming in.
    """

    def __init__(self, score: Tensor, tau: int, edges: tuple[float, float] | None, threshold: float) -> None:
        self._tau, self._edges, self._threshold = tau, edges, threshold
        self.aggregate = torch.zeros_like(score)
        self.frozen = score.clone()
        self.thoughts = torch.full_like(score, -1, dtype=torch.int64)
        self.thought = torch.full_like(score[:, 0], REASONING, dtype=torch.int64)
        self._decoded = 0
        self._looks: list[Tensor] = []

    def look(self, weight: Tensor, occupied: Tensor, key_value_heads: int) -> None:
        """A layer's attention at a step, weight [B, Hq, S] over occupied [B, S], the new token among them."""
        if self._edges is None:
            self._looks.append(received(weight))
        else:
            self._looks.append(sparsity_of(weight, occupied, key_value_heads, self._threshold))

    def admit(self, kept: Tensor, frozen: Tensor, aggregate: Tensor | None) -> None:
        """A prompt's tokens `kept` [B, N] take slots 0.. with what they have so far, [B, N]."""
        count = kept.shape[1]
        self.frozen[:, :count] = frozen
        if aggregate is not None:
            self.aggregate[:, :count] = aggregate.masked_fill(kept < 0, 0)
        self.thoughts[:, :count] = torch.where(kept < 0, -1, REASONING)

    def step(self, slot: Tensor, frozen: Tensor) -> None:
        """The new token sits in `slot` [B, 1], and `frozen` [B] is what it scores by itself."""
        total = self._looks[0]
        for look in self._looks[1:]:
            total = total + look
        mean, self._looks = total / len(self._looks), []
        if self._edges is None:
            self.aggregate = self.aggregate.scatter(1, slot, 0) + mean
        elif self._decoded % self._tau == 0:
            self.thought = classify(mean, self._edges)
        self.frozen = self.frozen.scatter(1, slot, frozen[:, None])
        self.thoughts = self.thoughts.scatter(1, slot, self.thought[:, None])
        self._decoded += 1

    def score(self, occupied: Tensor) -> Tensor:
        """[B, S], -inf in free slots."""
        return (self.aggregate + self.frozen).masked_fill(~occupied, -torch.inf)

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was."""
        for name in ("aggregate", "frozen", "thoughts", "thought"):
            setattr(self, name, getattr(self, name).index_select(0, index))


def by_thought(order: Tensor, thoughts: Tensor) -> Tensor:
    """An order of eviction [B, S] of slots, with the least important thoughts [B, S] first."""
    return order.gather(1, victims(thoughts.gather(1, order), order.shape[1]))
