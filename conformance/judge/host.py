"""Judge on the CPU what a GPU computed.

The judge's tensors are small and its operations many. On a GPU each operation is a launch, and processes that share the
GPU wait for each other. So the implementation under test runs on the GPU, and small cases, results and states are
copied bit by bit to the CPU, where the reference runs in float64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cases.case import Case

CPU = torch.device("cpu")
#: A case with more elements is judged where it is.
MOST_ELEMENTS = 2**18
#: The attribute of a copy: the tensor on the GPU, and the versions of both when the copy was made.
ORIGINAL = "_kvtwin_original"


def judges(case: Case) -> bool:
    """True if `case` is on a GPU, and small enough to be judged on the CPU."""
    if case.device.startswith("cpu"):
        return False
    return sum(tensor.numel() for tensor in case.tensors.values() if tensor is not None) <= MOST_ELEMENTS


def of_case(case: Case) -> Case:
    """The case with the same tensors on the CPU."""
    if "_on_host" not in case.__dict__:
        copy = dataclasses.replace(case, device="cpu")
        copy._adopt({name: to_cpu(tensor) for name, tensor in case.tensors.items()})
        case.__dict__["_on_host"] = copy
    found = case.__dict__["_on_host"]
    assert isinstance(found, Case)
    return found


def to_cpu(value: Any) -> Any:
    """A copy on the CPU of a tensor, or of those in a tuple, a list or a dict. Anything else is returned unchanged."""
    if isinstance(value, Tensor):
        copy = value.to(CPU, copy=True)
        setattr(copy, ORIGINAL, (value, value._version, copy._version))
        return copy
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_cpu, value))
    if isinstance(value, tuple | list):
        return type(value)(map(to_cpu, value))
    if isinstance(value, dict):
        return {name: to_cpu(one) for name, one in value.items()}
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """The inverse of `to_cpu`: tensors on `device`, those that were copied with the strides that they had there."""
    if isinstance(value, Tensor):
        original, version, copy_version = getattr(value, ORIGINAL, (None, 0, 0))
        if original is not None and (original._version, value._version) == (version, copy_version):
            return original
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(one, device) for one in value))
    if isinstance(value, tuple | list):
        return type(value)(to_device(one, device) for one in value)
    if isinstance(value, dict):
        return {name: to_device(one, device) for name, one in value.items()}
    return value


def calling(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`function`, which computes on `device`, for tensors on the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return to_cpu(function(*to_device(args, device), **to_device(kwargs, device)))

    return call


class OnHost:
    """A state under test on a GPU, as if it were on the CPU: its tensors are copies, and what it is given, or what is
    set, is copied to the GPU."""

    def __init__(self, state: Any, device: torch.device) -> None:
        object.__setattr__(self, "on_device", state)
        object.__setattr__(self, "its_device", device)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.on_device, name)
        if isinstance(value, torch.device):
            return CPU
        if callable(value) and not isinstance(value, type):
            return calling(value, self.its_device)
        return to_cpu(value)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.on_device, name, to_device(value, self.its_device))
