"""A layer's cache under SyncKV: representative heads look at everything, now and then on behalf of the others.

A step t (section 4, algorithm 1): the token joins the cache. R-heads attend to all of it; the other heads to what their
cluster's R-head chose (a static set, once, and a dynamic one) and to every token since it last chose, their own
included, which the paper's algorithm would leave out until then. If t is a multiple of the stride, an anticipation
step, the R-head chooses anew, by this step's weights, from all tokens that there are; its cluster sees that from step
t + 1 on (eq. 7). The prefill is step 0. Nothing is ever evicted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attention_weights, causal_attention, weighted_values
from ..contract import check_prompt, check_reorder, check_step, resolve_device, resolve_scale, state_sizes
from .contract import HeadClusters, SyncKVConfig
from .contract_state import check_config, check_room, resolve_clusters
from .sets import ascending, best_of, initial_sets, log_weights, split_budget

__all__ = ["SyncKVConfig", "SyncKVState"]


class SyncKVState:
    """The cache of `batch` sequences in one layer (SyncKV section 4).

    head_clusters: which heads choose for which, N_r = config.clusters of them; default: see `resolve_clusters`.
    dtype: that of queries, keys and values; float64 makes it the oracle. Token i sits in slot i of
    S = config.max_tokens. Readable, by slot: occupied [B, S] bool, positions [B, S] int64 (-1 = no token), key and
    value [B, Hkv, S, D]. By R-head, tokens ascending, -1 beyond the last: static [B, N_r, min(k_static, S)] int64, and
    chosen [B, N_r, min(k, S)] int64, the static and the dynamic set that the next step of the other heads attends to.

    Where the static set has fewer than k_static tokens, since the prompt had fewer, the dynamic one may have more: with
    exclude_static all tokens are chosen that the R-head had seen, or k of them.
    """

    def __init__(
        self, config: SyncKVConfig, head_clusters: HeadClusters | None = None, *, batch: int, query_heads: int,
        key_value_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        check_config(config)
        self.config = config
        self.sizes = state_sizes(
            batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, slots=config.max_tokens,
            head_dim=head_dim,
        )
        self.head_clusters = resolve_clusters(head_clusters, config.clusters, key_value_heads)
        self.dtype, self.device = dtype, resolve_device(device)
        self.scale = resolve_scale(config.scale, head_dim)
        self._heads = torch.tensor(self.head_clusters.representatives, device=self.device)
        self._labels = torch.tensor(self.head_clusters.labels, device=self.device)
        self.reset()

    @torch.inference_mode(False)  # else a state that was made in inference mode could not be used outside of it
    def reset(self) -> None:
        """Forget every token."""
        batch, _, heads, slots, head_dim = self.sizes
        clusters = self.config.clusters
        self._key, self._value = (
            torch.zeros(batch, heads, slots, head_dim, dtype=self.dtype, device=self.device) for _ in range(2)
        )
        self.occupied = torch.zeros(batch, slots, dtype=torch.bool, device=self.device)
        self._static = torch.zeros(batch, clusters, slots, dtype=torch.bool, device=self.device)
        self._chosen = torch.zeros_like(self._static)
        self._attended = torch.zeros(batch, heads, slots, dtype=torch.bool, device=self.device)  # by the last step
        self._seen, self._steps = 0, self.config.phase
        self._since = 0                               # the first token after the last anticipation

    @property
    def tokens_seen(self) -> int:
        """Tokens that came in, padding included."""
        return self._seen

    @property
    def key(self) -> Tensor:
        return self._key

    @property
    def value(self) -> Tensor:
        return self._value

    @property
    def positions(self) -> Tensor:
        slot = torch.arange(self.sizes.slots, device=self.device)
        return torch.where(self.occupied, slot, -1)

    @property
    def static(self) -> Tensor:
        return self._tokens(self._static, split_budget(self.config.k, self.config.rho)[0])

    @property
    def chosen(self) -> Tensor:
        return self._tokens(self._chosen, self.config.k)

    def _tokens(self, mask: Tensor, most: int) -> Tensor:
        """The tokens of a mask [B, N_r, S], ascending, then -1."""
        slot = torch.arange(self.sizes.slots, device=self.device)
        return ascending(torch.where(mask, slot, -1))[..., :min(most, self.sizes.slots)]

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """The prompt: full causal attention; then each R-head chooses by the row's last token.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, default all True.
        Returns [B, Hq, T, D]; padding gives zeros. RuntimeError when the state already holds tokens; ValueError for
        more than config.max_tokens of them.
        """
        total = check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        if self._seen:
            raise RuntimeError("prefill needs an empty state: call reset() first")
        check_room(0, total, self.config.max_tokens)
        if occupied is None:
            occupied = torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        token = torch.arange(total, device=self.device)
        self.occupied[:, :total] = occupied
        self.key[:, :, :total], self.value[:, :, :total] = key, value
        last = torch.where(occupied, token, 0).amax(1)                                  # [B]
        newest = query.take_along_dim(last[:, None, None, None], 2)[:, :, 0]            # [B, Hq, D]
        static, dynamic = initial_sets(                                                 # eq. 3 and 4
            self._of_r_heads(newest), key[:, self._heads], occupied, *split_budget(self.config.k, self.config.rho),
            scale=self.scale,
        )
        self._static = self._mask(static)
        self._chosen = self._static | self._mask(dynamic)
        self._seen = self._since = total
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token; R-heads attend to all tokens, others to those chosen and to the newest.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. ValueError where
        config.max_tokens have been seen.
        """
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_room(self._seen, 1, self.config.max_tokens)
        self.key[:, :, self._seen], self.value[:, :, self._seen] = key, value
        self.occupied[:, self._seen] = True
        self._attended = self._visible()
        weight = attention_weights(query, self.key, self._attended, scale=self.scale)
        output = weighted_values(weight, self.value, self._attended)
        self._seen, self._steps = self._seen + 1, self._steps + 1
        if self._steps % self.config.stride == 0:
            self._anticipate(query)
            self._since = self._seen
        return output.to(query.dtype)

    def _visible(self) -> Tensor:
        """What each head attends to at a step, [B, Hkv, S] bool."""
        newest = self.occupied & (torch.arange(self.sizes.slots, device=self.device) >= self._since)
        visible = self._chosen[:, self._labels] | newest[:, None]                       # eq. 7, and what came since
        visible[:, self._heads] = self.occupied[:, None]
        return visible

    def _anticipate(self, query: Tensor) -> None:
        """The sets of the steps to come, by the weights of this one (eq. 5 and 6)."""
        config, key = self.config, self.key[:, self._heads]
        weight = log_weights(self._of_r_heads(query), key, self.occupied, self.scale)   # [B, N_r, S]
        candidates = self.occupied[:, None].expand(weight.shape)
        if config.exclude_static:
            room = min(config.k, self.sizes.slots) - self._static.sum(-1, keepdim=True)
            best = best_of(weight, candidates & ~self._static, min(config.k, self.sizes.slots))
            rank = torch.arange(best.shape[-1], device=self.device)
            best = best.masked_fill(rank >= room, -1)
        else:
            best = best_of(weight, candidates, split_budget(config.k, config.rho)[1])
        self._chosen = self._static | self._mask(best)

    def _of_r_heads(self, query: Tensor) -> Tensor:
        """query [B, Hq, D] -> [B, N_r G, D]."""
        return query.unflatten(1, (self.sizes.key_value_heads, -1))[:, self._heads].flatten(1, 2)

    def _mask(self, tokens: Tensor) -> Tensor:
        """tokens [B, N_r, N], -1 for none -> [B, N_r, S] bool."""
        slots = self.sizes.slots
        mask = torch.zeros(*tokens.shape[:2], slots + 1, dtype=torch.bool, device=self.device)  # one more, for none
        return mask.scatter(-1, tokens.where(tokens >= 0, slots), True)[..., :slots]

    def join(self) -> None:
        """What is launched from here on finds all tokens where they belong; here they always are."""

    def gpu_bytes(self) -> int:
        """Of the tensors on the state's device, which here is all of them."""
        return sum(tensor.untyped_storage().nbytes() for tensor in vars(self).values() if isinstance(tensor, Tensor))

    def host_bytes(self) -> int:
        """Of the bank in the host's memory, which is none here."""
        return 0

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        for name in ("_key", "_value", "occupied", "_static", "_chosen", "_attended"):
            setattr(self, name, getattr(self, name).index_select(0, index))
