"""EpiKV's decisions: which token is in which slot. Keys and values are separate, since one scorer serves all layers.

A score comes from the hidden states of two layers, or bands of layers, and is the same for all layers and heads. So a
model has one `EpiKVScorer` with positions, scores and the next slot, and each layer has only keys and values, in the
same slots. An `EpiKVState` that is used by itself has a scorer of its own. So has each layer under a policy that scores
by keys and values, which differ from layer to layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._rows import Rows
from ..attention import INF, accumulate_dtype, sum_in_order
from ..contract.arguments import check_dtype, check_next_slot, resolve_device
from ..contract.epikv.arguments import check_prompt_fits, check_scorer
from ..contract.epikv.config import EpiKVConfig
from ..contract.epikv.scorer import ScorerInputs
from ..contract.interruption import Reorderable
from ..selection import victims
from .hybrids import Attention, by_thought
from .scores import (
    _mean,
    _zscore,
    compacted,
    difference,
    hidden_change,
    kv_variance,
    lag_kv,
    lag_spread,
    rolling_mean,
    score_of,
    select,
)


class EpiKVScorer(Rows, Reorderable):
    """Positions and scores of S = config.slots slots per row, and the slot that the next token takes.

    occupied [B, S] bool; positions [B, S] int64: the position of the token in each slot, counted from 0 with padding
    included, -1 = free; score [B, S]: +inf for a kept prompt, -inf where unoccupied; next_slot [B] int64, writable. A
    token's score is computed once, when it arrives (section 3.3); with "attn_x_hs" it grows by the attention that the
    token receives. attention: the statistics of the hybrids (see `hybrids`), None for other policies.
    """

    _next_slot: Tensor
    _per_row = (
        "occupied", "positions", "score", "_next_slot", "_room", "_tokens", "_previous", "_values", "_low", "_high",
        "_low_before", "_high_before",
    )
    _nested = ("attention",)
    _of_all_rows = ("_seen", "_kept_prompt")

    def __init__(
        self, config: EpiKVConfig, *, batch: int, hidden_size: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        self.config = check_scorer(
            config, batch=batch, hidden_size=hidden_size, key_value_heads=key_value_heads, head_dim=head_dim
        )
        self.batch, self.hidden_size = batch, hidden_size
        self._vectors = (2, key_value_heads, head_dim)
        self.dtype = check_dtype("dtype", dtype)
        self.device = resolve_device(device)
        self._inputs = ScorerInputs(
            self.config, batch, hidden_size, key_value_heads, head_dim, self.dtype, self.device
        )
        self.reset()

    @property
    def tokens_seen(self) -> int:
        """The number of tokens since the last reset, padding included."""
        return self._seen

    @property
    def next_slot(self) -> Tensor:
        """The slot that the next token is written into. Assigning checks and copies the values."""
        return self._next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self._next_slot = check_next_slot(value, self._next_slot, self.config.slots).clone()

    @torch.inference_mode(False)  # tensors allocated in inference mode could not be updated outside of it
    def reset(self) -> None:
        """Forget every token."""
        self._interrupted = "reset"
        config, batch = self.config, self.batch
        layers = sum(config.layers)
        dtype = accumulate_dtype(torch.empty(0, dtype=self.dtype))

        def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=of, device=self.device)

        self.occupied = zeros(config.slots, of=torch.bool)
        self.positions = zeros(config.slots, of=torch.int64) - 1
        self.score = zeros(config.slots) - INF
        self._next_slot = zeros(of=torch.int64)
        self._room = zeros(of=torch.int64) + config.budget      # the number of slots that a row may use
        self._tokens = zeros(of=torch.int64)                    # tokens so far, without padding
        self._previous = zeros(layers, self.hidden_size, of=self.dtype)
        # The last `window` values of g of each layer, or of the variance, the newest last.
        self._values = zeros(max(1, layers), config.window)
        # The ranges of keys and values in the current chunk and in the one before it.
        self._low, self._high, self._low_before, self._high_before = (zeros(*self._vectors) for _ in range(4))
        self._seen = self._kept_prompt = 0
        self.attention: Any = Attention(
            self.score, config.tau, config.edges, config.sparsity_threshold, config.segments_by
        ) if config.reads_attention else None
        self._end_change()

    @property
    def _num_rows(self) -> int:
        return self.batch

    # A prompt --------------------------------------------------------------------------------------------------------

    def prefill(
        self, occupied: Tensor, hidden: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor,
        received: Tensor | None = None,
    ) -> None:
        """Score a prompt and assign its slots: occupied [B, T] bool; hidden [B, L, T, C] of both bands, or None; key,
        value [B, Hkv, T, D]; received [B, T]: the attention that its tokens received, for "attn_x_hs"."""
        self._inputs.check_prefill(occupied, hidden, key, value, received)
        self.check_prompt(occupied)
        self._start_change("prefill")
        if hidden is not None:
            layers = [*hidden[0].unbind(1), *hidden[1].unbind(1)]
            changes = torch.stack([self._observe(n, h, occupied) for n, h in enumerate(layers)], 1)
            one, other = changes.split(self.config.layers, 1)
            scores = score_of(one, other, self.config.policy, self.config.window, self._follows(occupied))
        else:
            scores = self._observe_vectors(key, value, occupied)
        self._admit(occupied, None if self.config.keep_prompt else scores, received)
        self._end_change()

    def check_prompt(self, occupied: Tensor) -> None:
        """ValueError for a prompt that does not fit; RuntimeError if the scorer holds tokens."""
        self._inputs.check_mask(occupied)
        if self._seen:
            raise RuntimeError("prefill needs an empty state: call reset() first")
        check_prompt_fits(self.config, int(occupied.sum(-1).max()))

    def observe(self, layer: int, hidden: Tensor, occupied: Tensor) -> Tensor:
        """The changes [B, T] of a layer's outputs for a prompt, [B, T, C]: 0 for a row's first token and for padding.

        layer: its number among the layers of band A, followed by those of band B. Only the last hidden state is stored.
        """
        self._inputs.check_observe(layer, hidden, occupied)
        self._start_change("observe")
        change = self._observe(layer, hidden, occupied)
        self._end_change()
        return change

    def _observe(self, layer: int, hidden: Tensor, occupied: Tensor) -> Tensor:
        hidden = hidden.masked_fill(~occupied[..., None], 0)
        index = torch.arange(hidden.shape[1], device=hidden.device).where(occupied, -1)
        last = index.cummax(1).values                                                   # or the last one before
        before = torch.cat((torch.full_like(last[:, :1], -1), last[:, :-1]), 1).clamp_min(0)
        rows = torch.arange(self.batch, device=hidden.device)
        follows = self._follows(occupied)
        change = hidden_change(hidden, hidden[rows[:, None], before]).masked_fill(~follows, 0)
        self._previous[:, layer] = hidden[rows, last[:, -1].clamp_min(0)]
        self._remember(layer, change, follows)
        return change

    def admit(self, occupied: Tensor, scores: Tensor | None, received: Tensor | None = None) -> None:
        """Assign slots to the prompt tokens that `select` keeps, in their order.

        scores [B, T], or None to keep the whole prompt; received [B, T] is added to them.
        """
        self._inputs.check_admit(occupied, scores, received)
        self.check_prompt(occupied)
        self._start_change("admit")
        self._admit(occupied, scores, received)
        self._end_change()

    def _admit(self, occupied: Tensor, scores: Tensor | None, received: Tensor | None) -> None:
        config, total = self.config, occupied.shape[1]
        if scores is None:
            kept = torch.arange(total, device=self.device).where(occupied, total).sort(-1).values
            kept = kept[:, :min(total, int(occupied.sum(-1).max()))]
            kept = kept.where(kept < total, -1)
            scores = torch.full_like(self.score[:, :1], INF).expand(-1, total)
            self._kept_prompt = total
            if not config.count_prompt:
                self._room = config.budget + occupied.sum(-1)
        else:
            whole = scores if received is None else scores + received
            kept = select(whole, config.budget, prompt=0, recent=config.newest, occupied=occupied)
        count = kept.shape[1]
        self.positions[:, :count] = kept
        self.occupied[:, :count] = kept >= 0
        self.score[:, :count] = scores.gather(1, kept.clamp_min(0)).masked_fill(kept < 0, -INF)
        if self.attention is not None:
            given = None if received is None else received.gather(1, kept.clamp_min(0))
            self.attention.admit(kept, self.score[:, :count], given)
            self.score = self.attention.score(self.occupied)
        self._tokens = occupied.sum(-1)
        self._seen = total
        self._choose()

    def _follows(self, occupied: Tensor) -> Tensor:
        """The tokens that are not the first of their row, [B, T] bool."""
        return occupied & (occupied.long().cumsum(1) > 1)

    def _remember(self, layer: int, values: Tensor, there: Tensor) -> None:
        """Store the last `window` of the values [B, T] that exist, for a layer: there [B, T] bool."""
        ordered = values.gather(1, compacted(there))[:, -self.config.window:]
        count = there.sum(1, keepdim=True)
        place = torch.arange(-ordered.shape[1], 0, device=values.device)
        self._values[:, layer, -ordered.shape[1]:] = ordered.masked_fill(place < -count, 0)

    def _observe_vectors(self, key: Tensor, value: Tensor, occupied: Tensor) -> Tensor:
        """The scores [B, T] of a prompt by its keys and values [B, Hkv, T, D]."""
        config = self.config
        key, value = (tensor.masked_fill(~occupied[:, None, :, None], 0) for tensor in (key, value))
        if config.policy == "lag_kv":
            for row, mask in enumerate(occupied):
                both = torch.stack((key[row][:, mask], value[row][:, mask])).to(self._low.dtype)    # [2, Hkv, n, D]
                chunks = both.split(config.chunk, 2) if both.shape[2] else ()
                for chunk, (low, high) in zip(
                    chunks[-2:][::-1], ((self._low, self._high), (self._low_before, self._high_before)), strict=False
                ):
                    low[row], high[row] = chunk.amin(2), chunk.amax(2)
            return lag_kv(key, value, chunk=config.chunk, spread=config.spread, occupied=occupied)
        variance = kv_variance(key if config.policy == "kv_key" else value)
        self._remember(0, variance, occupied)
        return rolling_mean(variance, config.window, occupied=occupied)

    # A step ----------------------------------------------------------------------------------------------------------

    def step(
        self, hidden: tuple[Tensor, Tensor] | None = None, key: Tensor | None = None, value: Tensor | None = None
    ) -> None:
        """Score the token in `next_slot` and select the next slot: hidden [B, L, C] of both bands, or None; key and
        value [B, Hkv, D] for policies that read them."""
        self._inputs.check_step(hidden, key, value)
        self._start_change("step")
        if hidden is not None:
            scores = self._hidden_score(torch.cat(hidden, 1))
        else:
            assert key is not None
            assert value is not None
            scores = self._vector_score(key, value)
        slot = self._next_slot[:, None]
        self.occupied.scatter_(1, slot, True)
        self.positions.scatter_(1, slot, self._seen)
        self.score.scatter_(1, slot, scores[:, None])
        if self.attention is not None:
            self.attention.step(slot, scores)
            self.score = self.attention.score(self.occupied)
        self._tokens = self._tokens + 1
        self._seen += 1
        self._choose()
        self._end_change()

    def _hidden_score(self, hidden: Tensor) -> Tensor:
        """The scores of a step: hidden [B, L, C] -> [B], 0 for a row's first token, which has no change."""
        window = self.config.window
        first = self._tokens == 0
        change = hidden_change(hidden, self._previous)                                  # [B, L]
        self._previous = hidden.clone()
        moved = torch.cat((self._values[..., 1:], change[..., None]), -1)
        self._values = torch.where(first[:, None, None], self._values, moved)
        there = torch.arange(window, device=self.device) >= window - self._tokens[:, None, None]
        there = there.expand(moved.shape)
        values = self._values
        rolled = _mean(values, there) if self.config.policy == "hs_variance" else _zscore(values, there, window)
        return difference(*rolled.split(self.config.layers, 1)).masked_fill(first, 0)

    def _vector_score(self, key: Tensor, value: Tensor) -> Tensor:
        """The scores of a step: key, value [B, Hkv, D] -> [B]."""
        config = self.config
        if config.policy == "lag_kv":
            return self._lag_score(torch.stack((key, value), 1).to(self._low.dtype))
        variance = kv_variance((key if config.policy == "kv_key" else value)[:, :, None])
        self._values = torch.cat((self._values[..., 1:], variance[..., None]), -1)
        there = torch.arange(config.window, device=self.device) >= config.window - 1 - self._tokens[:, None]
        return _mean(self._values[:, 0], there)

    def _lag_score(self, both: Tensor) -> Tensor:
        """The "lag_kv" scores of a step: both [B, 2, Hkv, D], key and value -> [B]."""
        begins = (self._tokens % self.config.chunk == 0)[:, None, None, None]
        self._low_before = self._low.where(begins, self._low_before)
        self._high_before = self._high.where(begins, self._high_before)
        self._low = torch.where(begins, both, torch.minimum(self._low, both))
        self._high = torch.where(begins, both, torch.maximum(self._high, both))
        spread = lag_spread(
            both[..., None, :], self._low_before, self._high_before, self.config.spread
        )[..., 0]                                                                       # [B, 2, Hkv]
        scores = sum_in_order(spread[:, 0] + spread[:, 1], 1) / spread.shape[2]
        return scores.masked_fill(self._tokens < self.config.chunk, INF)

    # The next slot ---------------------------------------------------------------------------------------------------

    def protected(self) -> Tensor:
        """The tokens that cannot be evicted for the next token, [B, S] bool: a kept prompt and the newest tokens, of
        which the next token will be one."""
        newest = self.positions > self._seen - self.config.newest
        return self.occupied & (newest | (self.positions < self._kept_prompt))

    def _choose(self) -> None:
        """Select the lowest free slot that the row may use, else the unprotected token with the lowest score, ties to
        the oldest. With "segment_hs", the least important thought type comes first."""
        slots = self.config.slots
        index = torch.arange(slots, device=self.device).expand(self.positions.shape)
        by_age = victims(self.positions, slots)                                         # oldest first
        order = by_age.gather(1, victims(self.score.gather(1, by_age), slots))
        if self.attention is not None:
            order = by_thought(order, self.attention.thoughts)
        turn = torch.empty_like(index).scatter(1, order, index)                         # 0 is evicted first
        turn = torch.where(self.protected(), turn + slots, turn)
        free = torch.where(index < self._room[:, None], index - slots, index + 2 * slots)
        self._next_slot = victims(torch.where(self.occupied, turn, free), 1)[:, 0]
