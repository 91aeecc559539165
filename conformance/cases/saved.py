"""Reading the files that `Case.save` writes: a case with its tensors, and what was judged with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .case import ABOUT, KINDS, Case


def load(path: Path | str, device: str | None = None) -> Case:
    """Load a saved case to `device` (default: the CPU). ValueError, which names the file, for any other content."""
    try:
        return _loaded(path, device)
    except Exception as error:  # a field or a tensor may be of any kind
        raise ValueError(f"{path} holds no saved case: {type(error).__name__}: {error}") from error


def _loaded(path: Path | str, device: str | None) -> Case:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        fields = json.loads(file.metadata()["kvtwin"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    absent, made_on = fields.pop("absent"), fields.pop("made_on", None)
    for name in ABOUT:
        fields.pop(name, None)
    fields["device"] = device or "cpu"
    case = from_description(fields)
    if made_on is not None:  # too large for a file; a generator gives other numbers on a device of another kind
        if torch.device(made_on).type != torch.device(fields["device"]).type:
            raise ValueError(f"its tensors are made from its seed on {made_on}, got the device {fields['device']}")
        return case
    found = {
        **dict.fromkeys(absent),
        **{name: case.place(name, tensor.to(fields["device"])) for name, tensor in tensors.items()},
    }
    if case.content != "given" and _shapes(found) != _shapes(case.make()):
        raise ValueError(f"expected the tensors {_shapes(case.make())}, got {_shapes(found)}")
    case._adopt(found)
    return case


def from_description(fields: dict[str, Any]) -> Case:
    """The case that `Case.described` describes."""
    from .. import registry

    registry.every()  # import them all: they define most kinds
    fields = {**fields, "dtype": getattr(torch, fields["dtype"])}
    if "config" in fields:
        fields["config"] = tuple(
            (name, tuple(value) if isinstance(value, list) else value) for name, value in fields["config"]
        )
    if "turns" in fields:
        fields["turns"] = tuple(map(tuple, fields["turns"]))
    return KINDS[fields.pop("kind")](**fields)


def _shapes(tensors: Mapping[str, Tensor | None]) -> dict[str, tuple[int, ...] | None]:
    return {name: None if tensor is None else tuple(tensor.shape) for name, tensor in sorted(tensors.items())}


def about(path: Path | str) -> dict[str, str | None]:
    """What was judged with a saved case: the `subject`, a function or state; the `implementation`, a module; by the
    `version` of kvtwin. None for what the file does not say."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        found = json.loads(file.metadata()["kvtwin"])
    return {name: found.get(name) for name in ABOUT}
