"""The arguments of ThinKV's thoughts and eviction, checked for both sides. No mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from ..contract import (
    Sizes, check_attention, check_device, check_dtype, check_integer, check_mask, check_shape, check_strided,
    check_tensor,
)
from .contract import check_retention, check_share


def check_sparsity(query: object, key: object, occupied: object, threshold: object) -> Sizes:
    """The arguments of `attention_sparsity`."""
    sizes = check_attention(query, key, key)
    assert isinstance(key, Tensor)
    check_mask("occupied", occupied, (sizes.batch, sizes.slots), "[B, S]", key, "key")
    check_share("threshold", threshold)
    return sizes


def check_numbers(name: str, value: object) -> Tensor:
    """A floating tensor [...] of any number of dimensions."""
    if isinstance(value, Tensor) and value.dim() == 0:
        check_strided(name, value)
    else:
        check_tensor(name, value, dims=value.dim() if isinstance(value, Tensor) else 1, layout="[...]")
    assert isinstance(value, Tensor)
    check_dtype(f"{name}.dtype", value.dtype)
    return value


def check_traces(traces: object, layers: object, grid: object, bandwidth: object) -> list[Tensor]:
    """The arguments of `calibrate`. Reads the traces' values."""
    if not isinstance(traces, (tuple, list)) or not traces:
        raise TypeError(f"traces must be a sequence of tensors [all layers, steps], got {type(traces).__name__}")
    for number, trace in enumerate(traces):
        name = f"traces[{number}]"
        check_tensor(name, trace, dims=2, layout="[all layers, steps]")
        check_dtype(f"{name}.dtype", trace.dtype)
        if trace.shape[0] != traces[0].shape[0] or trace.shape[1] < 2:
            raise ValueError(
                f"{name} must be [all layers, steps] with the {traces[0].shape[0]} layers of traces[0] and at least 2 "
                f"steps, got {tuple(trace.shape)}"
            )
        if not bool(((trace >= 0) & (trace <= 1)).all()):
            raise ValueError(f"{name} must hold shares from 0 to 1, got values beyond, or NaN")
    if check_integer("layers", layers, minimum=1) > len(traces[0]):
        raise ValueError(f"layers must be at most the traces' {len(traces[0])} layers, got {layers}")
    check_integer("grid", grid, minimum=3)
    if bandwidth is not None:
        if isinstance(bandwidth, bool) or not isinstance(bandwidth, (int, float)):
            raise TypeError(f"bandwidth must be a float or None, got {type(bandwidth).__name__}: {bandwidth!r}")
        if not 0 < bandwidth < inf:
            raise ValueError(f"bandwidth must be positive and finite, got {bandwidth}")
    return list(traces)


def too_few_layers(counts: Sequence[Sequence[int]], layers: int, modes: int) -> ValueError:
    """The error of a calibration that finds too few layers; counts: of each prompt, how many modes each layer has."""
    by_layer = [", ".join(map(str, layer)) for layer in zip(*counts, strict=True)]
    found = sum(modes in layer for layer in zip(*counts, strict=True))
    shown = "; ".join(f"layer {number}: {text}" for number, text in enumerate(by_layer))
    return ValueError(
        f"traces must have at least layers = {layers} layers with {modes} modes in some prompt, got {found}; modes "
        f"by prompt: {shown}"
    )


def check_integers(name: str, value: object, shape: tuple[int, ...], layout: str, like: Tensor, of: str) -> Tensor:
    """An int64 tensor of a shape, on the device of `like`, which the caller knows as `of`."""
    value = check_tensor(name, value, dims=len(shape), layout=layout)
    check_dtype(f"{name}.dtype", value.dtype, (torch.int64,))
    check_shape(name, value, shape, layout)
    check_device(name, value, like.device, of)
    return value


def check_anneal(
    size: object, level: object, thought: object, current: object, trajectory_change: object, live: object,
    budget: object, retention: object,
) -> tuple[int, ...]:
    """The arguments of `anneal`, but for the values in tensors. Returns the retention."""
    size = check_tensor("size", size, dims=2, layout="[B, M]")
    check_dtype("size.dtype", size.dtype, (torch.int64,))
    rows = size.shape[:1]
    for name, value in (("level", level), ("thought", thought)):
        check_integers(name, value, tuple(size.shape), "size's [B, M]", size, "size")
    for name, value in (("current", current), ("live", live)):
        check_integers(name, value, tuple(rows), "[B]", size, "size")
    check_mask("trajectory_change", trajectory_change, tuple(rows), "[B]", size, "size")
    check_integer("budget", budget, minimum=1)
    return check_retention(retention)


def check_segment(key_segment: object, keep: object) -> Tensor:
    """The arguments of `select_representatives`. Returns the keys as [L, F]."""
    layout = "[Hkv, L, D] or [L, F]"
    dims = key_segment.dim() if isinstance(key_segment, Tensor) and key_segment.dim() in (2, 3) else 3
    key_segment = check_tensor("key_segment", key_segment, dims=dims, layout=layout)
    check_dtype("key_segment.dtype", key_segment.dtype)
    check_integer("keep", keep, minimum=1)
    return key_segment if dims == 2 else key_segment.transpose(0, 1).flatten(1)


def check_segments(key: object, slots: object, keep: object, most: object) -> int:
    """The arguments of `segment_representatives`, but for the values in slots and keep. Returns `most`."""
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, S, D]")
    check_dtype("key.dtype", key.dtype)
    slots = check_tensor("slots", slots, dims=3, layout="[B, M, L]")
    check_integers("slots", slots, (key.shape[0], *slots.shape[1:]), "[B, M, L] with key's B", key, "key")
    check_integers("keep", keep, tuple(slots.shape[:2]), "slots' [B, M]", key, "key")
    return slots.shape[-1] if most is None else check_integer("most", most, minimum=1)
