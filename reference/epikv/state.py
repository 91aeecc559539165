"""EpiKV's cache of one layer: keys and values in slots, attended to by every new token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import attention_weights, causal_attention, causal_logits, softmax, weighted_values
from ..contract import check_dtype, check_prompt, check_reorder, check_step, resolve_device, resolve_scale, state_sizes
from .contract import EpiKVConfig, check_hidden_states
from .hybrids import received
from .scorer import EpiKVScorer


class EpiKVState:
    """An EpiKV cache: a static buffer of S slots, of which one is overwritten at every step once they are full.

    key, value [B, Hkv, S, D] with S = config.slots; occupied [B, S] bool, positions [B, S] int64, score [B, S],
    next_slot [B] int64 (writable) and tokens_seen: its `EpiKVScorer`'s. scorer: one that layers of a model share, whose
    owner calls its `admit` before and its `step` after all of them; by default the state has its own, and does so. With
    a hybrid policy every layer that shares a scorer has a say (see `hybrids`).
    """

    def __init__(
        self, config: EpiKVConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, scorer: Any = None,
    ) -> None:
        if not isinstance(config, EpiKVConfig):
            raise TypeError(f"config must be an EpiKVConfig, got {type(config).__name__}")
        self.config = config
        self.sizes = state_sizes(
            batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, slots=config.slots,
            head_dim=head_dim,
        )
        self.dtype = check_dtype("dtype", dtype)
        self.device = resolve_device(device)
        self.scale = resolve_scale(config.scale, head_dim)
        self._hidden_size = config.hidden_size or query_heads * head_dim
        self._shared = scorer is not None
        self.scorer = scorer if scorer is not None else EpiKVScorer(
            config, batch=batch, hidden_size=self._hidden_size, key_value_heads=key_value_heads, head_dim=head_dim,
            dtype=dtype, device=device,
        )
        self._forget()

    @property
    def occupied(self) -> Tensor:
        """Which slots hold a token, [B, S] bool."""
        return self.scorer.occupied

    @property
    def positions(self) -> Tensor:
        """The token in each slot, [B, S] int64, -1 = free."""
        return self.scorer.positions

    @property
    def score(self) -> Tensor:
        """The frozen score of the token in each slot, [B, S]; +inf for a kept prompt, -inf where unoccupied."""
        return self.scorer.score

    @property
    def thoughts(self) -> Tensor | None:
        """With "segment_hs" the thought type of the token in each slot, [B, S] int64, -1 = free; else None."""
        return None if self.config.edges is None else self.scorer.attention.thoughts

    @property
    def tokens_seen(self) -> int:
        """Tokens that came in since the last reset, padding included."""
        return self.scorer.tokens_seen

    @property
    def next_slot(self) -> Tensor:
        """Where the next token will be written. Assigning checks the values and copies them."""
        return self.scorer.next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self.scorer.next_slot = value

    def reset(self) -> None:
        """Forget every token."""
        self._forget()
        if not self._shared:
            self.scorer.reset()

    @torch.inference_mode(False)
    def _forget(self) -> None:
        batch, _, heads, slots, head_dim = self.sizes
        self.key = torch.zeros(batch, heads, slots, head_dim, dtype=self.dtype, device=self.device)
        self.value = torch.zeros_like(self.key)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None,
        hidden_a: Tensor | None = None, hidden_b: Tensor | None = None,
    ) -> Tensor:
        """The prompt: full causal attention; then what `select` keeps of it takes slots, or all of it (keep_prompt).

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, default all True;
        hidden_a, hidden_b [B, L, T, C], or [B, T, C] of one layer: what the layers of the bands put out, for policies
        that read it. Returns [B, Hq, T, D]; padding gives zeros. RuntimeError when the state already holds tokens,
        ValueError for a prompt that does not fit.
        """
        total = check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        hidden = self._check_hidden(hidden_a, hidden_b, total)
        if occupied is None:
            occupied = torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        if not self._shared:
            self.scorer.prefill(occupied, hidden, key, value, self._received(query, key, occupied))
        kept = self.positions[:, :total].clamp_min(0)                                   # [B, N]
        count, place = kept.shape[1], kept[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        self.key[:, :, :count] = key.gather(2, place)
        self.value[:, :, :count] = value.gather(2, place)
        return output

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, hidden_a: Tensor | None = None, hidden_b: Tensor | None = None
    ) -> Tensor:
        """One token: written into `next_slot`, attended to together with the rest, then scored, and the next slot is
        chosen.

        query [B, Hq, D]; key, value [B, Hkv, D]; hidden_a, hidden_b [B, L, C], or [B, C] of one layer, for policies
        that read them. Returns the attention output [B, Hq, D].
        """
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        hidden = self._check_hidden(hidden_a, hidden_b, None)
        slot = self.next_slot[:, None]
        place = slot[:, None, :, None].expand(-1, self.sizes.key_value_heads, -1, self.sizes.head_dim)
        self.key.scatter_(2, place, key[:, :, None])
        self.value.scatter_(2, place, value[:, :, None])
        occupied = self.occupied.scatter(1, slot, True)
        weight = attention_weights(query, self.key, occupied, scale=self.scale)
        output = weighted_values(weight, self.value, occupied).to(query.dtype)
        if self.config.reads_attention:
            self.scorer.attention.look(weight, occupied, self.sizes.key_value_heads)
        if not self._shared:
            self.scorer.step(hidden, key, value)
        return output

    def _received(self, query: Tensor, key: Tensor, occupied: Tensor) -> Tensor | None:
        """What a prompt's queries gave its tokens, [B, T], where that counts."""
        if self.config.policy != "attn_x_hs" or self.config.keep_prompt:
            return None
        weight = softmax(causal_logits(query, key, occupied, scale=self.scale))
        return received(weight.masked_fill(~occupied[:, None, :, None], 0))

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        if not self._shared:
            self.scorer.reorder(index)
        self.key, self.value = (tensor.index_select(0, index) for tensor in (self.key, self.value))

    def _check_hidden(self, one: object, other: object, tokens: int | None) -> tuple[Tensor, Tensor] | None:
        if self._shared:
            if one is not None or other is not None:
                raise ValueError("hidden_a and hidden_b must be left out: the shared scorer has them from its owner")
            return None
        return check_hidden_states(
            self.config, (one, other), batch=self.sizes.batch, tokens=tokens, hidden_size=self._hidden_size,
            dtype=self.dtype, device=self.device,
        )
