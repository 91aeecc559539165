"""CAKE: the layers of a model share a total of tokens by their preferences, and evict again whenever a layer joins.

Paper: Qin et al., "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences" (2025, arXiv 2503.12491), and
the authors' code, antgroup/cakekv at c4675ce. The attention of a prompt's last queries gives a layer its preference and
each token an indicator. The caches of several layers have a `CAKECascade` in common; they get the prompt one after the
other.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import INF, accumulate_dtype, attention_weights, causal_attention, weighted_values
from ..contract.arguments import check_config, check_integer
from ..contract.cake import check_shared_cascade
from ..contract.cascade import CAKEConfig, Cascade
from ..selection import gather_tokens, order
from ..state import State
from .cake_prompt import ObserveResult, budgets, kept, log_preference, observe, step_score

__all__ = ["CAKECascade", "CAKEConfig", "CAKEState", "ObserveResult", "budgets", "log_preference", "observe"]


class CAKECascade(Cascade):
    __doc__ = Cascade.__doc__

    def _share(self, log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
        return budgets(log_preferences, prefix, total)


class CAKEState(State):
    """The CAKE cache of `batch` sequences in one layer.

    cascade: what the layers of a model share; layer: the number of this one, from 0. By default the state has a cascade
    of its own with one layer, and keeps config.budget tokens of a prompt. The owner of a shared cascade reorders it;
    layer 0 begins a new prompt in it.

    After a prompt, a row keeps the tokens of the last config.window positions and, of those before, budgets[row] per KV
    head, by their indicators; if it has at most budget + window tokens, all of them. A step writes its token into the
    lowest free slot and attends to all tokens. Then the row evicts down to budgets[row] + window tokens per KV head, of
    those outside of the window the ones with the lowest weights, see `step_score`. Ties evict the oldest token.

    Readable: key, value [B, Hkv, S, D]; occupied [B, Hkv, S] bool; positions [B, Hkv, S] int64, counted with padding,
    -1 = free; budgets [B] int64. S is what the rows need, at least one more than the most tokens between two calls. It
    changes with a prompt, of this layer or of a later one: after it, tokens are in the order of their positions, in the
    first slots. A prompt and a reset therefore allocate; steps do not.
    """

    config: CAKEConfig
    _per_slot: ClassVar[tuple[str, ...]] = ("key", "value", "positions", "_score")
    _per_row: ClassVar[tuple[str, ...]] = ("budgets", "_short")
    _of_all_rows: ClassVar[tuple[str, ...]] = (*State._of_all_rows, "_prompt")

    def __init__(
        self, config: CAKEConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, cascade: Any = None, layer: int = 0,
    ) -> None:
        config = check_config(config, CAKEConfig)
        super().__init__(
            config, slots=config.budget + 1, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads,
            head_dim=head_dim, dtype=dtype, device=device,
        )
        self._shared, self.layer = cascade is not None, check_integer("layer", layer, minimum=0)
        if self._shared:
            check_shared_cascade(cascade, CAKECascade, config, self.sizes.batch, self.device)
        self.cascade = cascade if self._shared else CAKECascade(config, layers=1, batch=batch, device=device)
        if self.layer >= self.cascade.layers:
            raise ValueError(f"layer must be below the cascade's {self.cascade.layers} layers, got {layer}")
        self.reset()

    @property
    def occupied(self) -> Tensor:
        """The slots that hold a token, [B, Hkv, S] bool."""
        return self.positions >= 0

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, padding included; 0 without one."""
        return self._prompt

    def _allocate(self) -> None:
        """A shared cascade is left as it is."""
        if not self._shared:
            self.cascade.reset()
        batch, _, heads, _, head_dim = self.sizes
        shape = (batch, heads, self.config.budget + 1)
        self.sizes = self.sizes._replace(slots=shape[2])
        self.key = torch.zeros(*shape, head_dim, dtype=self.dtype, device=self.device)
        self.value = torch.zeros_like(self.key)
        self.positions = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        self._score = torch.full(shape, -INF, dtype=accumulate_dtype(self.key), device=self.device)
        self.budgets = torch.full((batch,), self.config.prefix_budget, dtype=torch.int64, device=self.device)
        self._short = torch.ones(batch, dtype=torch.bool, device=self.device)
        self._prompt = 0

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then this layer and those before it evict.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding, which takes no slot. RuntimeError if the state holds tokens, or if a
        layer before it has changed since this prompt; ValueError if such a layer has no prompt yet, or another number
        of tokens; TypeError or ValueError for other invalid arguments.
        """
        occupied = self._check_prompt(query, key, value, occupied)
        self._check_empty()
        total, config = occupied.shape[1], self.config
        self.cascade.check(self.layer, total)
        self._start_change("prefill")
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        window = min(total, config.window)
        found = observe(
            query[:, :, total - window:], key, occupied, gamma=config.gamma, kernel_size=config.kernel_size,
            scale=self.scale,
        )
        preference = log_preference(
            found.dispersion, found.shift, tau1=config.tau1, tau2=config.tau2, whole_batch=config.whole_batch
        )
        self.key, self.value, self._score = key, value, found.score
        positions = torch.arange(total, device=self.device).expand(found.score.shape)
        self.positions = positions.masked_fill(~occupied[:, None], -1)
        self._short = occupied.sum(1) <= config.budget + config.window
        self._seen = self._prompt = total
        self.cascade.admit(self, self.layer, preference, occupied)
        self._end_change()
        return output

    def _take(self, source: Any, index: Tensor) -> None:
        self.sizes = self.sizes._replace(slots=source.sizes.slots)
        super()._take(source, index)

    def evict(self, budget: Tensor) -> None:
        """Keep the best `budget` [B] tokens outside of the window, and set `budgets`. For the cascade, during a prompt.
        """
        self.budgets = budget.clone()
        keep = kept(self._score, budget) | self._short[:, None, None] & self.occupied
        self._keep(keep)

    def _keep(self, keep: Tensor) -> None:
        """Allocate what the tokens of `keep` [B, Hkv, S] need, and put them into the first slots, in order."""
        held = keep.sum(-1)                                                             # [B, Hkv]
        most = torch.maximum(held.amax(1), self.budgets + self.config.window)           # [B]
        slots = int(most.amax()) + 1
        place = (~keep).to(torch.int8).sort(dim=-1, stable=True).indices
        place = place.masked_fill(torch.arange(keep.shape[-1], device=self.device) >= held[..., None], -1)
        place = pad(place, (0, max(0, slots - keep.shape[-1])), value=-1)[..., :slots]  # [B, Hkv, slots]
        self.key, self.value = gather_tokens(self.key, place), gather_tokens(self.value, place)
        at, free = place.clamp_min(0), place < 0
        self.positions = self.positions.gather(-1, at).masked_fill(free, -1)
        self._score = self._score.gather(-1, at).masked_fill(free, -INF)
        self.sizes = self.sizes._replace(slots=slots)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a token, attend to it and to the cached tokens, then evict.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. TypeError or ValueError for
        invalid arguments.
        """
        self._check_step(query, key, value)
        self._start_change("step")
        index = torch.arange(self.sizes.slots, device=self.device)
        slot = index.where(~self.occupied, self.sizes.slots).amin(-1, keepdim=True)     # [B, Hkv, 1], the lowest free
        place = slot[..., None].expand(-1, -1, -1, self.sizes.head_dim)
        self.key = self.key.scatter(2, place, key[:, :, None])
        self.value = self.value.scatter(2, place, value[:, :, None])
        self.positions = self.positions.scatter(2, slot, self._seen)
        self._seen += 1
        weight = attention_weights(query, self.key, self.occupied, scale=self.scale)    # [B, Hq, S]
        output = weighted_values(weight, self.value, self.occupied).to(query.dtype)
        window = self.occupied & (self.positions >= self._seen - self.config.window)
        self._score = step_score(weight, self.positions, window, kernel_size=self.config.kernel_size)
        self._evict_step(self._stays(window))
        self._end_change()
        return output

    def _stays(self, window: Tensor) -> Tensor:
        """The tokens that stay after a step, [B, Hkv, S] bool. window: those that must."""
        wanted = (self.budgets[:, None] + self.config.window - window.sum(-1)).amin(1)  # equal in all heads
        place = order(self.positions)                                                   # ties evict the oldest token
        in_order = torch.empty_like(self._score).scatter(-1, place, self._score)
        return kept(in_order, wanted).gather(-1, place)

    def _evict_step(self, keep: Tensor) -> None:
        self.positions = self.positions.masked_fill(~keep, -1)
        self._score = self._score.masked_fill(~keep, -INF)
