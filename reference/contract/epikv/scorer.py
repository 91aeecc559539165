"""Checks of the arguments of `EpiKVScorer`'s methods, for both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import (
    check_dtype,
    check_integer,
    check_mask,
    check_no_grad,
    check_shape,
    check_state_tensor,
    check_tensor,
)
from .config import EpiKVConfig


@dataclass(frozen=True)
class ScorerInputs:
    """The sizes of a scorer. Its methods raise TypeError or ValueError for arguments that do not fit."""

    config: EpiKVConfig
    batch: int
    hidden_size: int
    key_value_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def check_mask(self, occupied: object) -> int:
        """occupied [B, T] bool. Returns T."""
        total = occupied.shape[-1] if isinstance(occupied, Tensor) and occupied.dim() else 1
        like = torch.empty(0, device=self.device)
        check_mask("occupied", occupied, (self.batch, total), "[B, T]", like, "the state")
        return total

    def check_prefill(
        self, occupied: object, hidden: object, key: object, value: object, received: object
    ) -> None:
        """occupied [B, T]; hidden [B, L, T, C] of both bands, or None; key, value [B, Hkv, T, D]; received [B, T]."""
        total = self.check_mask(occupied)
        self._check_bands(hidden, (total,), "[B, L, T, C]")
        vectors = (self.batch, self.key_value_heads, total, self.head_dim)
        for name, tensor in (("key", key), ("value", value)):
            self._check(name, tensor, vectors, "[B, Hkv, T, D]")
        self._check_scores("received", received, total)

    def check_step(self, hidden: object, key: object, value: object) -> None:
        """hidden [B, L, C] of both bands for policies that read them; else key and value [B, Hkv, D]."""
        self._check_bands(hidden, (), "[B, L, C]")
        if hidden is None:
            for name, tensor in (("key", key), ("value", value)):
                self._check(name, tensor, (self.batch, self.key_value_heads, self.head_dim), "[B, Hkv, D]")

    def check_observe(self, layer: object, hidden: object, occupied: object) -> None:
        """layer: less than the number of layers of both bands; hidden [B, T, C]; occupied [B, T]."""
        layers = sum(self.config.layers)
        if check_integer("layer", layer, minimum=0) >= layers:
            raise ValueError(f"layer must be less than {layers}, the number of layers of both bands, got {layer}")
        total = self.check_mask(occupied)
        self._check("hidden", hidden, (self.batch, total, self.hidden_size), "[B, T, C]")

    def check_admit(self, occupied: object, scores: object, received: object) -> None:
        """occupied, scores and received [B, T]; the last two may be None."""
        total = self.check_mask(occupied)
        self._check_scores("scores", scores, total)
        self._check_scores("received", received, total)
        if (scores is None) != self.config.keep_prompt:
            raise ValueError(f"scores must be None if and only if keep_prompt is True, got {self.config.keep_prompt}")
        if scores is None and received is not None:
            raise ValueError("received must be None if scores is None: a prompt that is kept has no scores")

    def _check_bands(self, hidden: object, time: tuple[int, ...], layout: str) -> None:
        if not self.config.reads_hidden:
            if hidden is not None:
                raise ValueError(f"hidden must be None: policy {self.config.policy!r} reads none")
            return
        if not isinstance(hidden, (tuple, list)) or len(hidden) != 2:
            raise TypeError(f"hidden must be a pair of tensors {layout}, got {type(hidden).__name__}")
        for place, (tensor, layers) in enumerate(zip(hidden, self.config.layers, strict=True)):
            name, shape = f"hidden[{place}]", (self.batch, layers, *time, self.hidden_size)
            if layers:
                self._check(name, tensor, shape, layout)
            elif not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be a tensor {layout} = {shape}, without layers")

    def _check(self, name: str, tensor: object, shape: tuple[int, ...], layout: str) -> None:
        checked = check_tensor(name, tensor, dims=len(shape), layout=layout)
        check_shape(name, checked, shape, layout)
        check_state_tensor(name, checked, self.dtype, self.device)
        check_no_grad(**{name: checked})

    def _check_scores(self, name: str, scores: object, total: int) -> None:
        if scores is None:
            return
        checked = check_tensor(name, scores, dims=2, layout="[B, T]")
        check_shape(name, checked, (self.batch, total), "[B, T]")
        check_dtype(f"{name}.dtype", checked.dtype)
        if checked.device != self.device:
            raise ValueError(f"{name} must be on the state's device {self.device}, got {checked.device}")
