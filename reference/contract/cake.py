"""Checks of the arguments of CAKE's rules. See `arguments` for the errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import MethodConfig, Sizes
from .arguments import (
    check_device,
    check_dtype,
    check_flag,
    check_integer,
    check_like,
    check_mask,
    check_number,
    check_shape,
    check_tensor,
)
from .attention import check_attention

LEAST_TAU = 1e-6  # with less, quotients of logarithms leave the range of floats


def check_observe(
    query_window: object, key: object, occupied: Tensor | None, gamma: object, kernel_size: object
) -> tuple[Tensor, Sizes]:
    """The arguments of `observe`. Returns occupied [B, T], by default all True, and the sizes."""
    sizes = check_attention(query_window, key, key, steps="T", time="W", name="query_window")
    assert isinstance(query_window, Tensor) and isinstance(key, Tensor)
    if query_window.shape[2] > sizes.slots:
        raise ValueError(
            f"query_window must be [B, Hq, W, D] with W <= T = {sizes.slots}, got {tuple(query_window.shape)}"
        )
    check_indicator(gamma, kernel_size)
    if occupied is None:
        return torch.ones(sizes.batch, sizes.slots, dtype=torch.bool, device=key.device), sizes
    check_mask("occupied", occupied, (sizes.batch, sizes.slots), "[B, T]", key, "key")
    return occupied, sizes


def check_indicator(gamma: object, kernel_size: object) -> None:
    """The options of an indicator."""
    if not 0 <= check_number("gamma", gamma) < math.inf:
        raise ValueError(f"gamma must be finite and at least 0, got {gamma}")
    if check_integer("kernel_size", kernel_size, minimum=1) % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")


def check_preference(tau1: object, tau2: object, whole_batch: object) -> None:
    """The options of a preference."""
    for name, tau in (("tau1", tau1), ("tau2", tau2)):
        if not LEAST_TAU <= check_number(name, tau) < math.inf:
            raise ValueError(f"{name} must be finite and at least {LEAST_TAU}, got {tau}")
    check_flag("whole_batch", whole_batch)


def check_log_preference(dispersion: object, shift: object, tau1: object, tau2: object, whole_batch: object) -> None:
    """The arguments of `log_preference`."""
    dispersion = check_tensor("dispersion", dispersion, dims=1, layout="[B]")
    check_dtype("dispersion.dtype", dispersion.dtype)
    shift = check_tensor("shift", shift, dims=1, layout="[B]")
    check_shape("shift", shift, tuple(dispersion.shape), "dispersion's [B]")
    check_like("shift", shift, dispersion, "dispersion")
    check_preference(tau1, tau2, whole_batch)


def check_budgets(log_preferences: object, prefix: object, total: object) -> None:
    """The arguments of `budgets`."""
    log_preferences = check_tensor("log_preferences", log_preferences, dims=2, layout="[B, layers]")
    check_dtype("log_preferences.dtype", log_preferences.dtype)
    _check_counts("prefix", prefix, log_preferences, "log_preferences")
    check_integer("total", total, minimum=1)


def check_kept(score: object, budget: object) -> None:
    """The arguments of `kept`."""
    score = check_tensor("score", score, dims=3, layout="[B, Hkv, T]")
    check_dtype("score.dtype", score.dtype)
    _check_counts("budget", budget, score, "score")


def check_cascade(scores: object, log_preferences: object) -> None:
    """The arguments of `cascade` that its other functions do not check."""
    if not isinstance(scores, (list, tuple)):
        raise TypeError(f"scores must be a list or tuple of tensors, got {type(scores).__name__}")
    log_preferences = check_tensor("log_preferences", log_preferences, dims=2, layout="[B, layers]")
    for layer, score in enumerate(scores):
        check_tensor(f"scores[{layer}]", score, dims=3, layout="[B, Hkv, T]")
    if len(scores) != log_preferences.shape[1]:
        raise ValueError(f"scores must have log_preferences' {log_preferences.shape[1]} layers, got {len(scores)}")


def _check_counts(name: str, count: object, like: Tensor, of: str) -> None:
    """One int64 number per row of `like`."""
    count = check_tensor(name, count, dims=1, layout="[B]")
    if count.dtype != torch.int64:
        raise TypeError(f"{name} must have dtype torch.int64, got {count.dtype}")
    check_shape(name, count, (like.shape[0],), f"{of}'s [B]")
    check_device(name, count, like.device, of)


def check_shared_cascade(cascade: Any, kind: type[Any], config: MethodConfig, batch: int, device: torch.device) -> None:
    """A cascade that a state shares with other layers: of class `kind`, and made for the state's sizes and options.
    Layers may have scales of their own."""
    if not isinstance(cascade, kind):
        raise TypeError(f"cascade must be a {kind.__name__}, got {type(cascade).__name__}")
    own, shared = (replace(each, scale=None) for each in (config, cascade.config))
    for name, wanted, found in (
        ("config", own, shared), ("batch", batch, cascade.batch), ("device", device, cascade.device)
    ):
        if found != wanted:
            raise ValueError(f"cascade must have the state's {name}, {wanted}, got {found}")
