"""SyncKV's cache adapter: each layer has its own head clusters, measured on the model in advance.

Both sides share this module, which contains no mathematics: each side has its own weights and similarities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..contract.arguments import check_flag, check_integer
from ..contract.synckv.types import HeadClusters, SyncKVConfig
from .cache_adapter import StateCache
from .cache_adapter_layer import StateLayer

#: The attention function that passes queries and keys to observers, active within `watching`.
WATCH = "kvtwin_watch"
Observe = Callable[[int, Tensor, Tensor, float, Tensor], None]

_observers: list[Observe] = []


def _watched(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention. Observers get layer, query [B, Hq, T, D], key [B, Hkv, T, D], scale and mask [B,
    T]."""
    valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    if isinstance(attention_mask, Tensor):
        # The newest token attends to all tokens but padding.
        valid = attention_mask[:, 0, -1].bool().expand(valid.shape)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    for observe in _observers:
        observe(int(getattr(module, "layer_idx")), query, key, scale, valid)  # noqa: B009
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return output, None


AttentionInterface.register(WATCH, _watched)
AttentionMaskInterface.register(WATCH, sdpa_mask)


@contextmanager
def watching(model: Any, observe: Observe) -> Iterator[None]:
    """Within this context, every layer of full attention passes its queries and keys to `observe`."""
    before = model.config._attn_implementation
    model.set_attn_implementation(WATCH)
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)
        model.set_attn_implementation(before)


def layer_similarities(
    model: Any, texts: Iterable[Tensor | Mapping[str, Tensor]], *, k: int, steps: int,
    log_weights: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    head_similarity: Callable[..., Tensor],
) -> list[Tensor]:
    """The mean similarity of the heads in each layer (SyncKV eq. 2), [Hkv, Hkv] float64, first layer first.

    texts: input ids [B, T], or the model's keyword arguments; padding must be on the left. For each of the last `steps`
    tokens of a text, the weights of this token and all earlier ones count. Layers are processed one at a time, and
    within a layer one token at a time, so no attention matrix is stored. ValueError without any token.
    """
    check_integer("k", k, minimum=1)
    check_integer("steps", steps, minimum=1)
    totals: dict[int, Tensor] = {}
    counts: dict[int, int] = {}

    def observe(layer: int, query: Tensor, key: Tensor, scale: float, valid: Tensor) -> None:
        tokens = key.shape[2]
        for at in range(max(tokens - steps, 0), tokens):
            seen = valid[:, :at + 1]
            rows = valid[:, at].nonzero()[:, 0]
            if not len(rows):
                continue
            weight = log_weights(query[rows, :, at], key[rows, :, :at + 1], seen[rows], scale)   # [rows, Hkv, at + 1]
            one = head_similarity(weight, k, occupied=seen[rows]).cpu() * len(rows)
            totals[layer] = totals.get(layer, torch.zeros_like(one)) + one
            counts[layer] = counts.get(layer, 0) + len(rows)

    with torch.no_grad(), watching(model, observe):
        for text in texts:
            model(use_cache=False, **({"input_ids": text} if isinstance(text, Tensor) else text))
    if not totals:
        raise ValueError("texts must hold at least one text with a token that is not padding")
    return [totals[layer] / counts[layer] for layer in sorted(totals)]


class SyncCache(StateCache):
    """Base class of SyncKV's caches. Each side sets State. budget: another name of k. See `StateCache`."""

    Config: ClassVar[Any] = SyncKVConfig

    def __init__(
        self, config: PreTrainedConfig, *, k: int | None = None, budget: int | None = None,
        head_clusters: Sequence[HeadClusters] | None = None, spread: bool = False, **options: Any,
    ) -> None:
        if k is not None and budget is not None:
            raise TypeError("k and budget are the same option: pass one of them")
        self._spread = check_flag("spread", spread)
        if spread and "phase" in options:
            raise TypeError("phase is not an option beside spread, which gives each layer its own phase")
        self._clusters = None if head_clusters is None else check_layers(head_clusters, config)
        if self._clusters is not None and "clusters" in options:
            raise TypeError("clusters is not an option beside head_clusters, which determines it")
        super().__init__(config, budget=budget if k is None else check_integer("k", k, minimum=1), **options)

    def _method_config(self, budget: int, options: dict[str, Any]) -> SyncKVConfig:
        return SyncKVConfig(budget, **options)

    def join(self) -> None:
        """Wait for pending transfers to host memory. With offload, call this at the end of a CUDA graph capture."""
        for layer in self.layers:
            if isinstance(layer, StateLayer) and layer.state is not None:
                layer.state.join()

    def _no_rollback(self) -> str | None:
        return "offload=True has no second copy of its memory" if self.config.offload else super()._no_rollback()

    def _config_of(self, number: int) -> Any:
        config: Any = self.config
        if self._spread:
            config = replace(config, phase=number % config.stride)
        if self._clusters is not None:
            config = replace(config, clusters=len(self._clusters[number].representatives))
        return config

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        if self._clusters is None:
            return super()._layer(number, mask)
        clusters = self._clusters[number]
        state: Any = self.State
        with_clusters: Any = partial(state, head_clusters=clusters)
        return StateLayer(self._config_of(number), with_clusters, mask)


def check_layers(head_clusters: object, config: object) -> tuple[HeadClusters, ...]:
    """Return one HeadClusters per layer of the model, with one label per KV head."""
    if not isinstance(head_clusters, (tuple, list)) or not all(isinstance(one, HeadClusters) for one in head_clusters):
        raise TypeError(f"head_clusters must be a sequence of HeadClusters, one per layer, got {head_clusters!r}")
    if isinstance(config, PreTrainedConfig):
        sizes = config.get_text_config(decoder=True)
        if len(head_clusters) != sizes.num_hidden_layers:
            raise ValueError(
                f"head_clusters needs one entry per layer of the model: expected {sizes.num_hidden_layers}, "
                f"got {len(head_clusters)}"
            )
        heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
        for number, clusters in enumerate(head_clusters):
            if len(clusters.labels) != heads:
                raise ValueError(
                    f"head_clusters[{number}] needs one label per KV head: expected {heads}, got "
                    f"{len(clusters.labels)}"
                )
    return tuple(head_clusters)
