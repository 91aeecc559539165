"""The SyncKV cache of one layer: R-heads attend to all tokens, the other heads to those that their R-head selected.

A step t (section 4, algorithm 1): the token joins the cache. R-heads attend to all tokens. Each other head attends to
the tokens that the R-head of its cluster selected (a static set, selected once, and a dynamic one) and to every token
since the last selection, its own included; the paper's algorithm would omit these newer tokens until the next
selection. With config.union_clusters, the tokens that any R-head selected take the place of those that its own
selected. If t is a multiple of the stride (an anticipation step), the R-head selects a new dynamic set by the weights
of this step. Its cluster attends to it from step t + 1 on (eq. 7). The prefill is step 0. No token is evicted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ranks import Heads
from ..attention import attention_weights, causal_attention, weighted_values
from ..contract.arguments import check_config, check_room
from ..contract.ranks import ProcessGroup, check_heads, check_process_group, digest, heads_of_ranks
from ..contract.synckv.arguments import resolve_clusters
from ..contract.synckv.types import HeadClusters, SyncKVConfig
from ..state import State
from .sets import ascending, best_of, initial_by, log_weights, split_budget

__all__ = ["SyncKVConfig", "SyncKVState"]


class SyncKVState(State):
    """The SyncKV cache of `batch` sequences in one layer (section 4).

    head_clusters: the layer's clusters, N_r = config.clusters of them; None: see `resolve_clusters`. dtype: the dtype
    of queries, keys and values; float64 makes it the oracle. Token i is in slot i of S = config.max_tokens. Readable by
    slot: occupied [B, S] bool; positions [B, S] int64, -1 = no token; key and value [B, Hkv, S, D]. Readable by R-head,
    tokens ascending, then -1: static [B, N_r, min(k_static, S)] int64; chosen [B, N_r, min(k, S)] int64, the static and
    dynamic sets that the other heads of the cluster (with config.union_clusters, of all clusters) attend to at the next
    step.

    If the prompt had fewer than k_static tokens, the dynamic set may be larger: with exclude_static, all tokens that
    the R-head has seen are selected, up to k.

    process_group: the ranks that share the heads of these sequences. Each has a state of its query heads and of their
    KV heads, in the order of the ranks. head_clusters are of the KV heads of all ranks, and so are static and chosen,
    the same on all ranks. replicas: the number of ranks in a row that hold the same KV heads, each with a part of their
    query heads: more than 1 if there are more ranks than KV heads. The ranks' calls must match, as for
    `kvtwin.reference.longflow.LongFlowState`.
    """

    config: SyncKVConfig
    _per_slot = ("_key", "_value", "occupied", "_static", "_chosen", "_attended")
    _of_all_rows = (*State._of_all_rows, "_steps", "_since")

    def __init__(
        self, config: SyncKVConfig, head_clusters: HeadClusters | None = None, *, batch: int, query_heads: int,
        key_value_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str,
        process_group: ProcessGroup | None = None, replicas: int = 1,
    ) -> None:
        super().__init__(
            check_config(config, SyncKVConfig), slots=config.max_tokens, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        # Before a list of as many heads, which would take forever if their keys do not fit into memory.
        torch.empty(batch, key_value_heads, config.max_tokens, head_dim, dtype=dtype, device=self.device)
        check_heads(
            process_group, replicas, key_value_heads, config=config, head_clusters=head_clusters, batch=batch,
            query_heads_per_key_value_head=self.sizes.group, head_dim=head_dim, dtype=dtype,
        )
        self._ranks = Heads(process_group, replicas)
        first, total = heads_of_ranks(process_group, replicas, key_value_heads)
        self.head_clusters = resolve_clusters(head_clusters, config.clusters, total)
        self._heads = torch.tensor(self.head_clusters.representatives, device=self.device)
        own = self._heads - first                                       # the R-heads among this rank's heads
        self._own = own[(own >= 0) & (own < key_value_heads)]
        self._labels = torch.tensor(self.head_clusters.labels, device=self.device)[first:first + key_value_heads]
        self.reset()

    def _allocate(self) -> None:
        batch, _, heads, slots, head_dim = self.sizes
        clusters = self.config.clusters
        self._key, self._value = (
            torch.zeros(batch, heads, slots, head_dim, dtype=self.dtype, device=self.device) for _ in range(2)
        )
        self.occupied = torch.zeros(batch, slots, dtype=torch.bool, device=self.device)
        self._static = torch.zeros(batch, clusters, slots, dtype=torch.bool, device=self.device)
        self._chosen = torch.zeros_like(self._static)
        self._attended = torch.zeros(batch, heads, slots, dtype=torch.bool, device=self.device)  # by the last step
        # _since is the first token after the last anticipation.
        self._steps, self._since = self.config.phase, 0

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
        """The tokens in a mask [B, N_r, S], ascending, then -1: [B, N_r, min(most, S)] int64."""
        slot = torch.arange(self.sizes.slots, device=self.device)
        return ascending(torch.where(mask, slot, -1))[..., :min(most, self.sizes.slots)]

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then each R-head selects its sets by the weights of the row's last
        token.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens; ValueError for more than
        config.max_tokens tokens; TypeError or ValueError for other invalid arguments.
        """
        occupied = self._check_prompt(query, key, value, occupied)
        self._check_empty()
        total = occupied.shape[1]
        check_room(0, total, self.config.max_tokens)
        if self._ranks.process_group is not None:
            check_process_group(self._ranks.process_group, tokens=total, occupied=digest(occupied))
        self._start_change("prefill")
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        token = torch.arange(total, device=self.device)
        self.occupied[:, :total] = occupied
        self.key[:, :, :total], self.value[:, :, :total] = key, value
        last = torch.where(occupied, token, 0).amax(1)                                  # [B]
        newest = query.take_along_dim(last[:, None, None, None], 2)[:, :, 0]            # [B, Hq, D]
        weight = self._weights(newest, key, occupied)                                   # [B, N_r, T]
        static, dynamic = initial_by(                                                   # eq. 3 and 4
            weight, occupied, *split_budget(self.config.k, self.config.rho)
        )
        self._static = self._mask(static)
        self._chosen = self._static | self._mask(dynamic)
        self._seen = self._since = total
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a token. R-heads attend to all tokens, the other heads to the selected and the newest ones.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. ValueError beyond
        config.max_tokens tokens; TypeError or ValueError for other invalid arguments.
        """
        self._check_step(query, key, value)
        check_room(self._seen, 1, self.config.max_tokens)
        self._start_change("step")
        self.key[:, :, self._seen], self.value[:, :, self._seen] = key, value
        self.occupied[:, self._seen] = True
        self._attended = self._visible()
        self._seen, self._steps = self._seen + 1, self._steps + 1
        attended, used = self._attended[..., :self._seen], (..., slice(self._seen), slice(None))  # later slots are free
        weight = attention_weights(query, self.key[used], attended, scale=self.scale)
        output = weighted_values(weight, self.value[used], attended).to(query.dtype)
        if self._steps % self.config.stride == 0:
            self._anticipate(query)
            self._since = self._seen
        self._end_change()
        return output

    def _visible(self) -> Tensor:
        """The tokens that each head attends to at a step, [B, Hkv, S] bool."""
        newest = self.occupied & (torch.arange(self.sizes.slots, device=self.device) >= self._since)
        if self.config.union_clusters:
            chosen = self._chosen.any(1, keepdim=True).expand(-1, len(self._labels), -1)  # algorithm 1, line 23
        else:
            chosen = self._chosen[:, self._labels]                                      # eq. 7
        visible = chosen | newest[:, None]                                              # and newer tokens
        visible[:, self._own] = self.occupied[:, None]
        return visible

    def _anticipate(self, query: Tensor) -> None:
        """Select the sets for the next steps by the weights of this one (eq. 5 and 6): query [B, Hq, D]."""
        config, occupied = self.config, self.occupied[:, :self._seen]
        weight = self._weights(query, self.key[:, :, :self._seen], occupied)            # [B, N_r, n]
        candidates = occupied[:, None].expand(weight.shape)
        if config.exclude_static:
            count = min(config.k, self.sizes.slots) - self._static.sum(-1, keepdim=True)
            best = best_of(weight, candidates & ~self._static[..., :self._seen], min(config.k, self.sizes.slots))
            rank = torch.arange(best.shape[-1], device=self.device)
            best = best.masked_fill(rank >= count, -1)
        else:
            best = best_of(weight, candidates, split_budget(config.k, config.rho)[1])
        self._chosen = self._static | self._mask(best)

    def _weights(self, query: Tensor, key: Tensor, occupied: Tensor) -> Tensor:
        """`log_weights` of the R-heads of all ranks: query [B, Hq, D], key [B, Hkv, S, D], occupied [B, S] of this
        rank -> [B, N_r, S]."""
        return self._ranks.largest(log_weights(query, key, occupied, self.scale))[:, self._heads]

    def _mask(self, tokens: Tensor) -> Tensor:
        """The slots of tokens [B, N_r, N], -1 for none: [B, N_r, S] bool."""
        slots = self.sizes.slots
        mask = torch.zeros(*tokens.shape[:2], slots + 1, dtype=torch.bool, device=self.device)  # the last is for -1
        return mask.scatter(-1, tokens.where(tokens >= 0, slots), True)[..., :slots]

    def join(self) -> None:
        """Wait for pending transfers to host memory. The reference has none."""

    def gpu_bytes(self) -> int:
        """The size in bytes of the tensors on the state's device. In the reference these are all tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in vars(self).values() if isinstance(tensor, Tensor))

    def host_bytes(self) -> int:
        """The size in bytes of the tokens in host memory, 0 in the reference."""
        return 0
