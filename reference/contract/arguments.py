"""Checks of single arguments, for both sides: numbers, flags, tensors, masks and devices.

Every check raises TypeError for a wrong kind or dtype and ValueError for a wrong shape, device or value. The message
names the argument, what was expected and what was given. A check does not read a tensor's elements, and so does not
synchronize with the GPU, unless its docstring says so.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

#: The optimized side multiplies the scale by log2(e) in float32, so half of the largest float32 is the limit.
LARGEST_SCALE = torch.finfo(torch.float32).max / 2
LARGEST_SOFTCAP = 2**20
MOST_ELEMENTS = 2**42
LARGEST_FLOAT = torch.finfo(torch.float64).max
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Kind = TypeVar("Kind")


# Numbers, flags and names --------------------------------------------------------------------------------------------


def check_integer(name: str, value: object, *, minimum: int | None = None) -> int:
    """Return `value` if it is an int of at least `minimum` that fits in int64, which torch computes with. A bool is
    refused: `sinks=True` is a typing error."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit in int64, got an int of {value.bit_length()} bits")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value


def check_product(**sizes: int) -> None:
    """ValueError if tensors of these sizes have MOST_ELEMENTS or more, too many for the memory of any GPU. Torch's own
    errors for them are of many kinds, objects that are made row by row take forever, and a system that promises more
    memory than it has lets kernels fill them."""
    elements = 1
    for size in sizes.values():                         # torch.compile cannot trace math.prod
        elements *= size
    if elements >= MOST_ELEMENTS:
        shown = " * ".join(map(str, sizes.values()))
        raise ValueError(f"{' * '.join(sizes)} must be less than {MOST_ELEMENTS}, got {shown}")


def check_number(name: str, value: object, *, kind: str = "a float") -> float:
    """Return `value` if it is a float, or an int that fits in one. `kind` is what the error message asks for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}: {value!r}")
    if isinstance(value, int) and abs(value) > LARGEST_FLOAT:
        raise ValueError(f"{name} must be finite as a float, got an int of {value.bit_length()} bits")
    return value


def check_share(name: str, value: object) -> float:
    """Return `value` as a float if it is a number strictly between 0 and 1."""
    if not 0 < check_number(name, value) < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return float(check_number(name, value))


def check_ratio(name: str, value: object) -> None:
    """A number from 0 to 1, both included."""
    if not 0 <= check_number(name, value) <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value}")


def check_frequencies(name: str, value: object) -> None:
    """A tuple of at least one number above 0 and at most 1."""
    if not isinstance(value, tuple):
        raise TypeError(f"{name} must be a tuple of floats, got {type(value).__name__}: {value!r}")
    if not value:
        raise ValueError(f"{name} must have at least one frequency, got none")
    for place, number in enumerate(value):
        if not 0 < check_number(f"{name}[{place}]", number) <= 1:
            raise ValueError(f"{name}[{place}] must be above 0 and at most 1, got {number}")


def check_pairs(name: str, frequencies: tuple[float, ...] | None, head_dim: int) -> None:
    """ValueError if there are more frequencies than pairs of channels."""
    if frequencies is not None and 2 * len(frequencies) > head_dim:
        raise ValueError(
            f"{name} must have at most head_dim / 2 = {head_dim // 2} frequencies, got {len(frequencies)}"
        )


def check_flag(name: str, value: object) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}: {value!r}")
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}: {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def check_kernel_size(kernel_size: object) -> None:
    """An odd int >= 1."""
    if check_integer("kernel_size", kernel_size, minimum=1) % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")


def check_scale(name: str, value: object) -> None:
    """None, which means head_dim ** -0.5, or a number that is finite in float32."""
    if value is not None and not abs(check_number(name, value, kind="a float or None")) <= LARGEST_SCALE:
        raise ValueError(f"{name} must be finite in float32, got {value}")


def check_softcap(name: str, value: object) -> None:
    """None, or a number from 1 to LARGEST_SOFTCAP: scales divided by it remain normal numbers of float32."""
    if value is not None and not 1 <= check_number(name, value, kind="a float or None") <= LARGEST_SOFTCAP:
        raise ValueError(f"{name} must be from 1 to {LARGEST_SOFTCAP}, got {value}")


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor on query . key: `scale`, or head_dim ** -0.5 if `scale` is None."""
    check_scale("scale", scale)
    return head_dim**-0.5 if scale is None else float(scale)


def check_config(config: object, kind: type[Kind]) -> Kind:
    """Return `config` if it is an instance of the class `kind`."""
    if not isinstance(config, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"config must be {article} {kind.__name__}, got {type(config).__name__}")
    return config


def check_room(seen: int, new: int, max_tokens: int) -> None:
    """ValueError if `new` tokens after the `seen` ones exceed the state's max_tokens."""
    if seen + new > max_tokens:
        raise ValueError(f"max_tokens={max_tokens} is too small for {seen + new} tokens")


# Tensors -------------------------------------------------------------------------------------------------------------


def check_tensor(name: str, value: object, *, dims: int, layout: str) -> Tensor:
    """Return `value` if it is a strided tensor of `dims` non-empty dimensions. `layout` describes them, "[B, S]"."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {layout}, got {type(value).__name__}")
    check_strided(name, value)
    if value.dim() != dims:
        raise ValueError(f"{name} must be {layout}, got a tensor of {value.dim()} dimensions: {tuple(value.shape)}")
    if min(value.shape) == 0:
        raise ValueError(f"{name} must be {layout} without empty dimensions, got {tuple(value.shape)}")
    return value


def check_strided(name: str, tensor: Tensor) -> None:
    """TypeError for sparse and packed layouts: they have no strides."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def check_shape(name: str, value: Tensor, expected: tuple[int, ...], layout: str) -> None:
    """The shape of `value` is `expected`, which the message calls `layout`."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} must be {layout} = {expected}, got {tuple(value.shape)}")


def check_device(name: str, value: Tensor, device: torch.device, of: str) -> None:
    """`value` is on `device`, the device of the argument called `of`."""
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like {of}, got {value.device}")


def check_like(name: str, value: Tensor, like: Tensor, of: str) -> None:
    """`value` has the dtype and the device of `like`, the argument called `of`."""
    if value.dtype != like.dtype:
        raise TypeError(f"{name} must have {of}'s dtype {like.dtype}, got {value.dtype}")
    check_device(name, value, like.device, of)


def check_dtype(name: str, dtype: object, allowed: tuple[torch.dtype, ...] = FLOATING) -> torch.dtype:
    """Return `dtype` if it is one of `allowed`."""
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        raise TypeError(f"{name} must be one of {', '.join(map(str, allowed))}, got {dtype}")
    return dtype


def check_mask(name: str, mask: object, expected: tuple[int, ...], layout: str, like: Tensor, of: str) -> None:
    """A bool mask of shape `expected` on the device of `like`. Numbers are refused: a float mask is a common error."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor {layout}, got {type(mask).__name__}")
    check_strided(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} must have dtype torch.bool, got {mask.dtype}")
    check_shape(name, mask, expected, layout)
    check_device(name, mask, like.device, of)


def check_positions(positions: object) -> Tensor:
    """Return positions [..., S] int64; -1 marks a slot without a token."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a torch.Tensor [..., S], got {type(positions).__name__}")
    check_tensor("positions", positions, dims=max(positions.dim(), 1), layout="[..., S]")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must have dtype torch.int64, got {positions.dtype}")
    return positions


def check_indices(name: str, index: Tensor, slots: int) -> None:
    """The elements of `index` are slots, from 0 to slots - 1, or -1 for none.

    Reads the elements (one synchronization) unless a CUDA graph is being captured or torch.compile is tracing.
    """
    if index.numel() == 0 or not readable(index):
        return
    low, high = torch.stack(index.aminmax()).tolist()
    if low < -1 or high >= slots:
        raise ValueError(f"{name} must be from 0 to {slots - 1}, or -1 for none, got values from {low} to {high}")


def check_all_finite(**tensors: Tensor) -> None:
    """ValueError for a tensor with NaN or infinity, and during CUDA graph capture.

    Reads every element (one synchronization per tensor), so callers run it only with check_finite=True.
    """
    for name, tensor in tensors.items():
        if capturing(tensor.device):
            raise ValueError("check_finite=True reads the tensors on the host: it cannot be captured in a CUDA graph")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity, which check_finite=True forbids")


# Arguments of a state ------------------------------------------------------------------------------------------------


def check_state_tensor(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """`tensor` has the state's dtype and is on the state's device."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must have the state's dtype {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the state's device {device}, got {tensor.device}")


def check_no_grad(**tensors: Tensor) -> None:
    """ValueError for a tensor that requires grad, unless gradients are disabled.

    A cache outlives the call: with the tensors it would keep the graph of every token that it has seen.
    """
    for name, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but a state has no backward: call under torch.no_grad()")


def check_next_slot(value: object, like: Tensor, slots: int) -> Tensor:
    """Return a value for `State.next_slot`: shape, dtype and device of `like`, elements from 0 to slots - 1.

    Reads the elements (one synchronization) unless a CUDA graph is being captured.
    """
    layout = "[B]" if like.dim() == 1 else "[B, Hkv]"
    value = check_tensor("next_slot", value, dims=like.dim(), layout=layout)
    check_shape("next_slot", value, tuple(like.shape), layout)
    check_like("next_slot", value, like, "the state")
    if not capturing(value.device):
        low, high = int(value.min()), int(value.max())
        if low < 0 or high >= slots:
            raise ValueError(f"next_slot must be from 0 to {slots - 1}, got values from {low} to {high}")
    return value


def check_reorder(index: object, batch: int, device: torch.device, name: str = "index") -> Tensor:
    """Return the row numbers for `State.reorder`: [B] int64, from 0 to batch - 1. name: the argument's.

    Reads the elements (one synchronization) unless a CUDA graph is being captured.
    """
    index = check_tensor(name, index, dims=1, layout="[B]")
    if index.dtype != torch.int64:
        raise TypeError(f"{name} must have dtype torch.int64, got {index.dtype}")
    check_shape(name, index, (batch,), "[B]")
    if index.device != device:
        raise ValueError(f"{name} must be on the state's device {device}, got {index.device}")
    if not capturing(device):
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= batch:
            raise ValueError(f"{name} must name rows 0 to {batch - 1}, got values from {low} to {high}")
    return index


# Devices -------------------------------------------------------------------------------------------------------------


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def readable(tensor: Tensor) -> bool:
    """Whether a check may read elements of `tensor`: it has some, and neither a CUDA graph is being captured nor
    torch.compile is tracing."""
    return not (tensor.is_meta or torch.compiler.is_compiling() or capturing(tensor.device))


def resolve_device(device: object) -> torch.device:
    """`device` as tensors report it: "cuda" becomes cuda:0, "cpu:0" becomes cpu. ValueError if torch cannot use it."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a torch.device or a str, got {type(device).__name__}: {device!r}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one that torch can use here, got {str(device)!r}: {reason}") from error
