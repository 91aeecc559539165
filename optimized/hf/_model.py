"""What a CUDA graph of a model's forward pass has as constants: where the weights are, hooks, settings of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._host import SIMPLE

#: Where transformers has hooks that collect hidden states, which a graph's output then has.
COLLECTS = "transformers.utils.output_capturing"


class Model:
    """The modules of a model as they are at one time."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._modules = modules
        self._tensors = [held for module in modules for held in (module._parameters, module._buffers) if held]
        self._inner = [module._modules for module in modules if module._modules]
        # Those of the model itself run around its forward method.
        self._hooks = [
            hooks for module in modules[1:]
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self.constants = tuple(self._constants())
        self.places = self._places()

    def unchanged(self) -> bool:
        """Whether the same modules have their weights where they were, and the same hooks. Weights may have changed in
        place."""
        return self._places() == self.places

    def _places(self) -> tuple[list[int], ...]:
        return (
            [id(inner) for held in self._inner for inner in held.values()],
            [tensor.data_ptr() for held in self._tensors for tensor in held.values() if tensor is not None],
            [number for hooks in self._hooks if hooks for number, hook in hooks.items() if not ours(hook)],
        )

    def _constants(self) -> Iterator[Any]:
        """The settings of all modules and of their configs."""
        configs: dict[int, object] = {}
        for module in self._modules:
            for name, value in vars(module).items():
                if not name.startswith(("_parameters", "_buffers", "_modules", "_forward", "_backward")):
                    yield id(module), name, constant(value)
            config = getattr(module, "config", None)
            if config is not None:
                configs[id(config)] = config
        for config in configs.values():
            for name, value in vars(config).items():
                yield name, constant(value)

    def unfit(self, device: torch.device) -> str:
        """Why a graph on this device cannot replace a forward pass of the model; empty if it can."""
        tensors = [tensor for held in self._tensors for tensor in held.values() if tensor is not None]
        devices = sorted({str(tensor.device) for tensor in tensors})
        if devices != [str(device)]:
            return f"the model must be on one device, the one of its inputs ({device}), and is on {', '.join(devices)}"
        if any(hasattr(module, "_hf_hook") for module in self._modules):
            return "hooks of accelerate, such as those of offloading, run on the host in each forward pass"
        if any(module.training for module in self._modules):
            return "the model must be in evaluation mode: call model.eval()"
        if any(not ours(hook) for hooks in self._hooks for hook in hooks.values()):
            return "modules of the model have forward hooks, which would not run"
        return ""


def ours(hook: Callable[..., Any]) -> bool:
    """Whether a hook needs not run in a replay."""
    return getattr(hook, "replayable", False) or getattr(hook, "__module__", "") == COLLECTS


def constant(value: Any) -> Any:
    """What of a value would be a constant of a graph, in a form that can be compared."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(constant, value))
    if isinstance(value, dict):
        return tuple((repr(name), constant(one)) for name, one in value.items())
    return value if isinstance(value, SIMPLE) else id(value)
