"""Checks of the arguments of ThinKV's config, thoughts and eviction, for both sides. See `contract.arguments`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from .. import Sizes
from ..arguments import (
    check_choice,
    check_device,
    check_dtype,
    check_indices,
    check_integer,
    check_mask,
    check_number,
    check_shape,
    check_share,
    check_strided,
    check_tensor,
    readable,
)
from ..attention import check_attention
from .types import BITS, LETTERS

# The config ----------------------------------------------------------------------------------------------------------


def check_retention(value: object) -> tuple[int, ...]:
    """Return a tuple of ints >= 0 that does not increase."""
    if not isinstance(value, (tuple, list)) or not value:
        raise TypeError(f"retention must be a tuple of ints, got {value!r}")
    for number, keep in enumerate(value):
        check_integer(f"retention[{number}]", keep, minimum=0)
    if any(later > earlier for earlier, later in pairwise(value)):
        raise ValueError(f"retention must not increase, got {tuple(value)}")
    return tuple(value)


def check_formats(value: object) -> dict[str, str]:
    """Return the element format of each of the letters R, E and T."""
    if not isinstance(value, Mapping):
        raise TypeError(f"formats must be a mapping of R, E and T to formats, got {type(value).__name__}: {value!r}")
    if set(value) != set(LETTERS):
        raise ValueError(f"formats must name R, E and T, got {sorted(map(str, value))}")
    return {letter: check_format(f"formats[{letter!r}]", value[letter]) for letter in LETTERS}


def check_format(name: str, value: object) -> str:
    """Return the name of an element format."""
    return check_choice(name, value, tuple(BITS))


def check_edges(value: object) -> tuple[float, float]:
    """Return (theta_1, theta_2): two numbers in ascending order."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"edges must be (theta_1, theta_2), got {value!r}")
    low, high = (check_number(f"edges[{number}]", edge) for number, edge in enumerate(value))
    if not low <= high:
        raise ValueError(f"edges must ascend, got {tuple(value)}")
    return float(low), float(high)


# Thoughts ------------------------------------------------------------------------------------------------------------


def check_sparsity(query: object, key: object, occupied: object, threshold: object, sparsity_of: object) -> Sizes:
    """The arguments of `attention_sparsity`. Returns the sizes."""
    sizes = check_attention(query, key, key)
    assert isinstance(key, Tensor)
    check_mask("occupied", occupied, (sizes.batch, sizes.slots), "[B, S]", key, "key")
    check_share("threshold", threshold)
    check_sparsity_of(sparsity_of)
    return sizes


def check_sparsity_of(value: object) -> str:
    """Return what a layer's sparsity is taken of: its KV heads, or the mean of their weights."""
    return check_choice("sparsity_of", value, ("heads", "mean"))


def check_numbers(name: str, value: object) -> Tensor:
    """Return a floating tensor [...] of any number of dimensions."""
    if isinstance(value, Tensor) and value.dim() == 0:
        check_strided(name, value)
    else:
        check_tensor(name, value, dims=value.dim() if isinstance(value, Tensor) else 1, layout="[...]")
    assert isinstance(value, Tensor)
    check_dtype(f"{name}.dtype", value.dtype)
    return value


def check_traces(traces: object, layers: object, grid: object, bandwidth: object) -> list[Tensor]:
    """The arguments of `calibrate`. Returns the traces. Reads their elements."""
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
    if bandwidth is not None and not 0 < check_number("bandwidth", bandwidth, kind="a float or None") < inf:
        raise ValueError(f"bandwidth must be positive and finite, got {bandwidth}")
    return list(traces)


def too_few_layers(counts: Sequence[Sequence[int]], layers: int, modes: int) -> ValueError:
    """The error of a calibration that finds too few layers. counts: the modes of each layer, by prompt."""
    by_layer = [", ".join(map(str, layer)) for layer in zip(*counts, strict=True)]
    found = sum(modes in layer for layer in zip(*counts, strict=True))
    shown = "; ".join(f"layer {number}: {text}" for number, text in enumerate(by_layer))
    return ValueError(
        f"traces must have at least layers = {layers} layers with {modes} modes in some prompt, got {found}; modes "
        f"by prompt: {shown}"
    )


# Eviction ------------------------------------------------------------------------------------------------------------


def check_integers(name: str, value: object, shape: tuple[int, ...], layout: str, like: Tensor, of: str) -> Tensor:
    """Return an int64 tensor of `shape` on the device of `like`, the argument called `of`."""
    value = check_tensor(name, value, dims=len(shape), layout=layout)
    check_dtype(f"{name}.dtype", value.dtype, (torch.int64,))
    check_shape(name, value, shape, layout)
    check_device(name, value, like.device, of)
    return value


def check_anneal(
    size: object, level: object, thought: object, current: object, trajectory_change: object, live: object,
    budget: object, retention: object,
) -> tuple[int, ...]:
    """The arguments of `anneal`, without the elements of the tensors. Returns the retention."""
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
    """The arguments of `segment_representatives`, without the elements of keep. Returns `most`.

    Reads the elements of slots (two synchronizations) unless a CUDA graph is being captured or torch.compile is
    tracing.
    """
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, S, D]")
    check_dtype("key.dtype", key.dtype)
    slots = check_tensor("slots", slots, dims=3, layout="[B, M, L]")
    check_integers("slots", slots, (key.shape[0], *slots.shape[1:]), "[B, M, L] with key's B", key, "key")
    check_integers("keep", keep, tuple(slots.shape[:2]), "slots' [B, M]", key, "key")
    most = slots.shape[-1] if most is None else check_integer("most", most, minimum=1)
    check_indices("slots", slots, key.shape[2])
    if readable(slots) and bool(((slots[..., 1:] >= 0) & (slots[..., :-1] < 0)).any()):
        raise ValueError("slots must have -1 only after a segment's last token, got -1 before a token")
    return most
