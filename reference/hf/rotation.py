"""Caches whose State rotates queries and keys by their places in the cache (`rerotate_keys=True`).

A model rotates queries and keys by their positions in the text before it passes them to the cache. `RotatedLayer`
undoes this with the same cosines and sines, since the State takes queries and keys before their rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..attention import accumulate_dtype
from ..contract.arguments import check_flag
from .cache_adapter import StateCache
from .cache_adapter_layer import StateLayer
from .options import FROM_MODEL

#: Models that rotate the halves of all channels of queries and keys, last of all, by `modeling_llama`'s arithmetic.
PLAIN = ("llama", "qwen2", "qwen3")


def frequencies(config: PreTrainedConfig) -> tuple[float, ...]:
    """The frequencies of a model's rotary embedding, head_dim / 2 numbers of float32, as transformers computes them.

    NotImplementedError for models whose embedding is not the plain one.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type not in PLAIN:
        raise NotImplementedError(
            f"rerotate_keys=True undoes the rotary embedding of {', '.join(PLAIN)} models; that of {text.model_type} "
            "is not supported"
        )
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or "rope_theta" not in rope:
        raise NotImplementedError(f"rerotate_keys=True needs the default rotary embedding, got rope_type {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedError("rerotate_keys=True needs a rotary embedding of all channels")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    channel = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    found: list[float] = (1.0 / (rope["rope_theta"] ** (channel / head_dim))).tolist()
    return tuple(found)


class RotatedLayer(StateLayer):
    """A layer that passes queries and keys to its State as they were before the model's rotary embedding."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        config: Any = self._config
        self._frequencies = torch.tensor(config.inv_freq, dtype=torch.float32, device=self.device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None,
        position_ids: Tensor | None = None, **changes: Any,
    ) -> Tensor:
        """See `StateLayer`. NotImplementedError if the model passes no positions."""
        if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != query.shape[2]:
            raise NotImplementedError(
                "rerotate_keys=True needs the model to pass position_ids [B, Q] to its attention function"
            )
        angle = position_ids[:, None, :, None].to(query.device).float() * self._frequencies   # [B or 1, 1, Q, D / 2]
        # In the model's order of roundings: float32, then its dtype.
        cos, sin = (turn.to(query.dtype) for turn in (angle.cos(), angle.sin()))
        query, key = (unrotated(tensor, cos, sin) for tensor in (query, key))
        return super().attend(query, key, value, mask, scaling, position_ids, **changes)


def unrotated(rotated: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo the rotary embedding of [B, H, Q, D] with cos and sin [B or 1, 1, Q, D / 2], in accumulate_dtype."""
    one, other = rotated.to(accumulate_dtype(rotated)).chunk(2, -1)
    cos, sin = cos.to(one.dtype), sin.to(one.dtype)
    # Rounded cosines and sines also scale, by the square root of this.
    square = cos * cos + sin * sin
    before = torch.cat([one * cos + other * sin, other * cos - one * sin], -1) / torch.cat([square, square], -1)
    return before.to(rotated.dtype)


class RotatedCache(StateCache):
    """Base class of the caches whose Config has `inv_freq`. rerotate_keys: see `block_caches`."""

    refused = (*FROM_MODEL, "inv_freq")

    def __init__(
        self, config: PreTrainedConfig, *, rerotate_keys: bool = False, **options: Any
    ) -> None:
        if "inv_freq" in options:
            raise TypeError("inv_freq is not an option here: rerotate_keys=True takes the frequencies of the model")
        if check_flag("rerotate_keys", rerotate_keys) and isinstance(config, PreTrainedConfig):
            options["inv_freq"] = frequencies(config)
        super().__init__(config, **options)

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        config: Any = self.config
        return (StateLayer if config.inv_freq is None else RotatedLayer)(config, self.State, mask)
