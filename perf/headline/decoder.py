"""A decoder of a model's true shape with random weights: everything in a decode step except the caches.

All methods and peers share it. Norms, matrix products and the next token use torch and cuBLAS. Rotation and SwiGLU are
one launch each (`pointwise`). For a single row, all products are kernels of `products`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm

from . import pointwise, products
from .base import Run

ITEM = 2


class Model(NamedTuple):
    """The sizes of a model. width: of the MLP. tied: the embedding is also the output matrix. head_norm: normalize the
    heads of queries and keys, as Qwen3 does."""

    name: str
    layers: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    hidden: int
    width: int
    vocabulary: int
    tied: bool = False
    head_norm: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.key_value_heads * self.head_dim * ITEM

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads. Of an untied embedding it reads only one row."""
        heads = 2 * (self.query_heads + self.key_value_heads) * self.head_dim
        return (self.layers * self.hidden * (heads + 3 * self.width) + self.hidden * self.vocabulary) * ITEM

    def activation_bytes(self, rows: int) -> int:
        """A generous estimate of the bytes of a step's activations."""
        return rows * ITEM * (3 * self.vocabulary + 8 * self.width + 16 * self.hidden)


QWEN_1_7B = Model("Qwen3-1.7B", 28, 16, 8, 128, 2048, 6144, 151_936, tied=True, head_norm=True)
QWEN_8B = Model("Qwen3-8B", 36, 32, 8, 128, 4096, 12_288, 151_936, head_norm=True)
LLAMA_8B = Model("Llama-3.1-8B", 32, 32, 8, 128, 4096, 14_336, 128_256)


def small(model: Model) -> Model:
    """The model at sizes that are small enough for Triton's interpreter."""
    return model._replace(
        layers=1, query_heads=2, key_value_heads=1, head_dim=16, hidden=32, width=32, vocabulary=64,
    )


#: attend(layer, query [B, Hq, T, D], key [B, Hkv, T, D], value) -> [B, Hq, T, D]; T is 1 at a decode step.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

#: Cosines and sines [T, D / 2], float32.
Rotation = tuple[Tensor, Tensor]


class _Layer(NamedTuple):
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor


class Decoder:
    """The weights of all layers, and tables of the rotation for `longest` positions."""

    def __init__(self, model: Model, run: Run, longest: int, layers: int | None = None) -> None:
        """layers: the number of layers, default all of the model."""
        self.model = model
        hidden, heads = model.hidden, model.query_heads * model.head_dim
        columns = heads + 2 * model.key_value_heads * model.head_dim

        def weights(rows: int, count: int) -> Tensor:
            """Random weights in the layout of torch.nn.Linear, for which libraries are tuned."""
            return run.draw(count, rows).mul_(rows**-0.5).t()

        self.layers = [
            _Layer(weights(hidden, columns), weights(heads, hidden), weights(hidden, 2 * model.width),
                   weights(model.width, hidden))
            for _ in range(model.layers if layers is None else layers)
        ]
        self.embedding = run.draw(model.vocabulary, hidden)
        self.head = self.embedding.t() if model.tied else weights(hidden, model.vocabulary)
        self.norm, self.head_norm = (
            torch.ones(size, dtype=torch.bfloat16, device=run.device) for size in (hidden, model.head_dim)
        )
        angle = torch.outer(
            torch.arange(longest, device=run.device, dtype=torch.float32),
            5e5 ** -torch.arange(0, 1, 2 / model.head_dim, device=run.device),
        )
        self.cosine, self.sine = angle.cos(), angle.sin()

    def normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, (self.model.hidden,), self.norm, 1e-6)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The normed rows of x times weight."""
        if len(x) == 1:
            return products.one_row(x, weight, norm=True)
        return self.normed(x) @ weight

    def added(self, x: Tensor, inner: Tensor, weight: Tensor, *, keep: bool) -> Tensor:
        """x + inner @ weight. Without `keep`, x may be overwritten."""
        if len(x) == 1:
            return products.one_row(inner, weight, residual=x)
        return torch.addmm(x, inner, weight) if keep else x.addmm_(inner, weight)

    def mlp(self, x: Tensor, layer: _Layer, tile: int) -> Tensor:
        """The output of a layer's MLP for x, with the residual. Computed in place, except for one row."""
        if len(x) == 1:
            return products.one_row(products.one_row(x, layer.up, norm=True, gated=True), layer.down, residual=x)
        for part in (x.split(tile) if tile else (x,)):
            part.addmm_(pointwise.swiglu(self.normed(part) @ layer.up), layer.down)
        return x

    def rotation(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at positions [T]."""
        return self.cosine[positions], self.sine[positions]

    def projected(self, number: int, x: Tensor, rotation: Rotation, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """query [B, Hq, T, D], key and value [B, Hkv, T, D] of a layer, from x [B * T, C]."""
        model = self.model
        parts = self.product(x, self.layers[number].qkv).view(batch, len(rotation[0]), -1, model.head_dim)
        count = model.query_heads + model.key_value_heads
        heads = parts
        if model.head_norm:
            heads = rms_norm(parts[:, :, :count], (model.head_dim,), self.head_norm, 1e-6).contiguous()
        pointwise.rotate(heads, count, *rotation)
        heads = heads[:, :, :count].transpose(1, 2)
        return heads[:, :model.query_heads], heads[:, model.query_heads:], parts[:, :, count:].transpose(1, 2)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, keep: Sequence[int] = (), tile: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """A forward pass: ids [B, T] at positions [T] -> the next ids [B], and the outputs [B, T, C] of the layers
        `keep`. tile: rows of x per call of the MLP, default all."""
        batch, total = ids.shape
        x = embedding(ids, self.embedding).view(batch * total, -1)
        kept, rotation = [], self.rotation(positions)
        for number, layer in enumerate(self.layers):
            output = attend(number, *self.projected(number, x, rotation, batch))
            output = output.transpose(1, 2).reshape(batch * total, -1)
            x = self.added(x, output, layer.out, keep=number - 1 in keep)          # do not overwrite a kept output
            del output
            x = self.mlp(x, layer, tile)
            if number in keep:
                kept.append(x.view(batch, total, -1))
        return self.product(x.view(batch, total, -1)[:, -1], self.head).argmax(-1), kept


class Loop:
    """A decode loop of a batch. Every step gets the ids that the previous step returned."""

    def __init__(self, decoder: Decoder, batch: int, position: int) -> None:
        device = decoder.embedding.device
        self.decoder = decoder
        self.ids = torch.arange(batch, device=device).remainder(decoder.model.vocabulary)[:, None]
        self.positions = torch.full((1,), position, dtype=torch.int64, device=device)

    def step(self, attend: Attend, keep: Sequence[int] = ()) -> list[Tensor]:
        found, kept = self.decoder.forward(self.ids, self.positions, attend, keep=keep)
        self.ids.copy_(found[:, None])
        return kept


def by_token(step: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Attend:
    """A state's step, whose tensors are [B, H, D], as `attend`."""
    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return step(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0])[:, :, None]

    return attend
