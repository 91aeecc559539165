"""Numbers for both sides, and layers of a model that pass them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def tokens(
    seed: int, count: int, *, heads: int, query_heads: int | None = None, head_dim: int = 16, batch: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, Hq, T, D]; key, value [B, Hkv, T, D]: normal numbers, of which the queries are twice as large."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, query_heads or heads), (batch, heads), (batch, heads))
    query, key, value = (
        torch.randn(*shape, count, head_dim, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return 2 * query, key, value


@contextmanager
def double() -> Iterator[None]:
    """New tensors are float64: the authors' code makes some without a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def blocks(prompt: int, steps: int) -> Iterator[tuple[int, int]]:
    """The first token and the end of a prompt, then of each step."""
    yield 0, prompt
    for at in range(prompt, prompt + steps):
        yield at, at + 1


def state(kind: Any, config: Any, query: Tensor, key: Tensor, **more: Any) -> Any:
    """A state of a reference for tensors of these shapes."""
    return kind(
        config, batch=query.shape[0], query_heads=query.shape[1], key_value_heads=key.shape[1],
        head_dim=query.shape[-1], dtype=query.dtype, device="cpu", **more,
    )


class Part(nn.Module):
    """A projection that takes its share of what the layer gets: the channels from `first` to `end`."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__()
        self.first, self.end = first, end
        self.weight = torch.zeros(1, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[..., self.first:self.end]


class Unrotated(nn.Module):
    """A rotary embedding that has no angles, for `unrotated`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1, 4096, 1), torch.zeros(1, 1, 4096, 1)


def unrotated(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb: the keys and queries that we draw are rotated already."""
    return query, key


def rotate_half(tensor: Tensor) -> Tensor:
    """rotate_half of transformers."""
    one, other = tensor.chunk(2, -1)
    return torch.cat([-other, one], -1)


def repeated(tensor: Tensor, times: int) -> Tensor:
    """repeat_kv of transformers."""
    return tensor.repeat_interleave(times, 1)


def hidden(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What a layer gets, [B, T, (Hq + 2 Hkv) D]: queries, keys and values side by side."""
    return torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)], -1)


def projections(query_heads: int, heads: int, head_dim: int) -> dict[str, nn.Module]:
    """The projections of a layer that gets `hidden`."""
    ends = [0, query_heads * head_dim, (query_heads + heads) * head_dim, (query_heads + 2 * heads) * head_dim]
    parts = {name: Part(ends[i], ends[i + 1]) for i, name in enumerate(("q_proj", "k_proj", "v_proj"))}
    return {**parts, "o_proj": nn.Identity()}


def layer(query_heads: int, heads: int, head_dim: int, **more: Any) -> SimpleNamespace:
    """What a function that replaces the forward of an attention layer reads from its `self`."""
    return SimpleNamespace(
        num_heads=query_heads, num_key_value_heads=heads, num_key_value_groups=query_heads // heads, head_dim=head_dim,
        hidden_size=query_heads * head_dim, layer_idx=0, training=False, attention_dropout=0.0, rotary_emb=Unrotated(),
        **projections(query_heads, heads, head_dim), **more,
    )


def causal(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The mask that a model adds to the logits of a prompt, [1, 1, T, T]."""
    return torch.full((count, count), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]


class ListCache:
    """transformers' DynamicCache of old: a list of keys and of values, a tensor per layer."""

    def __init__(self, *_: Any) -> None:
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []
        self._seen_tokens = 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        if len(self.key_cache) == layer:
            self.key_cache.append(key)
            self.value_cache.append(value)
        else:
            self.key_cache[layer] = torch.cat([self.key_cache[layer], key], 2)
            self.value_cache[layer] = torch.cat([self.value_cache[layer], value], 2)
        return self.key_cache[layer], self.value_cache[layer]
