"""The EpiKV cache of one layer: keys and values in the slots that an `EpiKVScorer` assigns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import attention_weights, causal_attention, causal_logits, softmax, weighted_values
from ..contract.arguments import check_config
from ..contract.epikv.arguments import HiddenInputs, check_ranks, check_scores
from ..contract.epikv.config import EpiKVConfig
from ..contract.ranks import ProcessGroup, Shared, check_process_group, digest
from ..state import State
from .hybrids import received
from .scorer import EpiKVScorer


class EpiKVState(State):
    """An EpiKV cache: a static buffer of S slots. Once they are full, one is overwritten at every step.

    key, value [B, Hkv, S, D] with S = config.slots. occupied [B, S] bool, positions [B, S] int64, score [B, S],
    next_slot [B] int64 (writable) and tokens_seen belong to the `EpiKVScorer`. scorer: a scorer that several layers
    share; its owner calls its `admit` before the prompt, its `step` after all layers attended, and its `reorder`. By
    default the state has a scorer of its own and calls these. With a hybrid policy, the attention of all layers that
    share a scorer is averaged (see `hybrids`).

    process_group: the ranks that share the heads of these sequences. Each has a state of its query heads and of their
    KV heads. All of them have the same hidden states, so they evict the same tokens, and a step needs no other rank.
    After a prompt they compare their scores. config.hidden_size is by default that of the query heads of all ranks. The
    ranks' calls must match, as for `kvtwin.reference.longflow.LongFlowState`. ValueError for policies that score by
    keys, values or attention weights, which a rank has of its own heads only.
    """

    config: EpiKVConfig
    _per_slot = ("key", "value")

    def __init__(
        self, config: EpiKVConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, scorer: Any = None, process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            check_config(config, EpiKVConfig), slots=config.slots, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        hidden_size = check_ranks(process_group, config, self.sizes, dtype)
        self._ranks = Shared(process_group)
        self._shared = scorer is not None
        self._inputs = HiddenInputs(config, batch, hidden_size, self.dtype, self.device, shared=self._shared)
        self.scorer = scorer if scorer is not None else EpiKVScorer(
            config, batch=batch, hidden_size=hidden_size, key_value_heads=key_value_heads, head_dim=head_dim,
            dtype=dtype, device=device,
        )
        self.reset()

    @property
    def occupied(self) -> Tensor:
        """The slots that hold a token, [B, S] bool."""
        return self.scorer.occupied

    @property
    def positions(self) -> Tensor:
        """The position of the token in each slot, [B, S] int64, -1 = free."""
        return self.scorer.positions

    @property
    def score(self) -> Tensor:
        """The score of the token in each slot, [B, S]: +inf for a kept prompt, -inf where unoccupied."""
        return self.scorer.score

    @property
    def thoughts(self) -> Tensor | None:
        """The thought type of the token in each slot, [B, S] int64, -1 = free. None unless policy is "segment_hs"."""
        return None if self.config.edges is None else self.scorer.attention.thoughts

    @property
    def tokens_seen(self) -> int:
        """The number of tokens since the last reset, padding included."""
        return self.scorer.tokens_seen

    @property
    def next_slot(self) -> Tensor:
        """The slot that the next token is written into. Assigning checks and copies the values."""
        return self.scorer.next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self.scorer.next_slot = value

    def _check_whole(self) -> None:
        super()._check_whole()
        self.scorer._check_whole()

    def _allocate(self) -> None:
        """A shared scorer is left as it is."""
        if not self._shared:
            self.scorer.reset()
        batch, _, heads, slots, head_dim = self.sizes
        self.key = torch.zeros(batch, heads, slots, head_dim, dtype=self.dtype, device=self.device)
        self.value = torch.zeros_like(self.key)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None,
        hidden_a: Tensor | None = None, hidden_b: Tensor | None = None,
    ) -> Tensor:
        """Full causal attention of the prompt; then the tokens that `select` keeps, or all (keep_prompt), take slots.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True;
        hidden_a, hidden_b [B, L, T, C], or [B, T, C] for one layer: the outputs of the layers of both bands, for
        policies that read them. Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens;
        ValueError for a prompt that does not fit; TypeError or ValueError for other invalid arguments.
        """
        occupied = self._check_prompt(query, key, value, occupied)
        total = occupied.shape[1]
        hidden = self._inputs.check(hidden_a, hidden_b, total)
        if not self._shared:
            self.scorer.check_prompt(occupied)
        if self._ranks.process_group is not None:
            check_process_group(self._ranks.process_group, tokens=total, occupied=digest(occupied))
        self._start_change("prefill")
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        if not self._shared:
            self.scorer.prefill(occupied, hidden, key, value, self._received(query, key, occupied))
        check_scores(self._ranks.process_group, self.positions, self.score)
        kept = self.positions[:, :total].clamp_min(0)                                   # [B, N]
        count, place = kept.shape[1], kept[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        self.key[:, :, :count] = key.gather(2, place)
        self.value[:, :, :count] = value.gather(2, place)
        self._end_change()
        return output

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, hidden_a: Tensor | None = None, hidden_b: Tensor | None = None
    ) -> Tensor:
        """Write a token into `next_slot`, attend to it and to the cached tokens, score it and select the next slot.

        query [B, Hq, D]; key, value [B, Hkv, D]; hidden_a, hidden_b [B, L, C], or [B, C] for one layer, for policies
        that read them. Returns the attention output [B, Hq, D]. TypeError or ValueError for invalid arguments.
        """
        self._check_step(query, key, value)
        hidden = self._inputs.check(hidden_a, hidden_b, None)
        self._start_change("step")
        slot = self.next_slot[:, None]
        place = slot[:, None, :, None].expand(-1, self.sizes.key_value_heads, -1, self.sizes.head_dim)
        self.key.scatter_(2, place, key[:, :, None])
        self.value.scatter_(2, place, value[:, :, None])
        occupied = self.occupied.scatter(1, slot, True)
        weight = attention_weights(query, self.key, occupied, scale=self.scale)
        output = weighted_values(weight, self.value, occupied).to(query.dtype)
        if self.config.reads_attention:
            self.scorer.attention.record(weight, occupied, self.sizes.key_value_heads)
        if not self._shared:
            self.scorer.step(hidden, key, value)
        self._end_change()
        return output

    def _received(self, query: Tensor, key: Tensor, occupied: Tensor) -> Tensor | None:
        """The sum of the weights that each prompt token receives, [B, T], or None if the policy does not use it."""
        if self.config.policy != "attn_x_hs" or self.config.keep_prompt:
            return None
        weight = softmax(causal_logits(query, key, occupied, scale=self.scale))
        return received(weight.masked_fill(~occupied[:, None, :, None], 0))

    def _take(self, source: Any, index: Tensor) -> None:
        """A shared scorer is left as it is."""
        super()._take(source, index)
        if not self._shared:
            self.scorer._take_rows(source.scorer, index)
