"""What a CUDA graph of a model's forward pass has as constants: where the weights are, hooks, settings of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ._host import SIMPLE

#: Where transformers has hooks that collect hidden states, which a graph's output then has.
COLLECTS = "transformers.utils.output_capturing"


class Model:
    """The modules of a model as they are at one time."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        self._modules = modules
        self._held: list[dict[str, Any]] = [
            held for module in modules for held in (module._modules, module._parameters, module._buffers) if held
        ]
        # Those of the model itself run around its forward method.
        self._hooks = [
            hooks for module in modules[1:]
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._handle = RemovableHandle.next_id                  # of the next hook that anybody registers anywhere
        self._constants = tuple(self._settings())
        self._objects = list(chain.from_iterable(map(dict.values, self._held)))
        self._before = list(map(dict, self._held))
        self._single = [
            (held, name, value) for held in self._held for name, value in held.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]
        self.weights = [one for one in self._objects if isinstance(one, Tensor)]
        self._places = list(map(Tensor.data_ptr, self.weights))
        self._numbers = self._hooked()

    def is_like(self, other: Model) -> bool:
        """Whether a graph of one is right for the other."""
        return list(map(id, self._objects)) == list(map(id, other._objects)) and (
            self._places, self._numbers, self._constants) == (other._places, other._numbers, other._constants)

    def unchanged(self) -> bool:
        """Whether the same modules have their weights where they were, and the same hooks. Weights may have changed in
        place. Runs before each replay, so it has no loops in Python. Hooks are seen here if they were registered, and
        those that were written into a module's dictionary at the next prompt."""
        return (
            self._has_its_objects() and list(map(Tensor.data_ptr, self.weights)) == self._places
            and (RemovableHandle.next_id == self._handle or self._hooked() == self._numbers)
        )

    def _has_its_objects(self) -> bool:
        """Whether the inner modules and weights are the same objects, under the same names. To compare dictionaries
        takes a third of the time of a comparison of their values by `is`. Objects that are the same are equal without
        a call of `==`. Those that are not are not equal either, or have no truth value, but for tensors of one element.
        """
        try:
            return self._held == self._before and all(held[name] is value for held, name, value in self._single)
        except Exception:
            return False

    def _hooked(self) -> list[int]:
        """The numbers of hooks."""
        return [number for hooks in filter(None, self._hooks) for number, hook in hooks.items() if not ours(hook)]

    def _settings(self) -> Iterator[Any]:
        """The settings of all modules and of their configs."""
        configs: dict[int, object] = {}
        for module in self._modules:
            for name, value in vars(module).items():
                if module is self._modules[0] and not isinstance(value, SIMPLE):
                    continue                    # what generate keeps there, such as a cache
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
        devices = sorted({str(tensor.device) for tensor in self.weights})
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
