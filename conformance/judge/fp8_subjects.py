"""Functions over FP8 keys and values, as subjects of the property tests (subjects.py)."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis.errors import UnsatisfiedAssumption

from ...reference.contract.scales import FP8
from .. import capabilities
from .subjects import Subject


@dataclass(frozen=True)
class Fp8Subject(Subject):
    """A function with FP8 keys and values, which another implementation need not take.

    scales: the parameters of such a function. An implementation whose function lacks one of them does not provide it.
    Without `scales`, it does not if the function raises TypeError for FP8, or refuses all FP8 types and no other type.
    """

    scales: tuple[str, ...] = ("key_scale", "value_scale")
    variant: str = "fp8"
    also: bool = True

    @property
    def dtypes(self) -> tuple[str, ...]:
        return capabilities.current().fp8

    def result(self, module: Any, inputs: dict[str, Any]) -> Any:
        from ..refusals import NotProvided

        if not getattr(module, "of_others", False):
            return super().result(module, inputs)
        lacking = NotProvided(f"{module}.{self.name} over FP8")
        if not inspect.signature(getattr(module, self.name)).parameters.keys() >= set(self.scales):
            raise lacking
        if self.scales:
            return super().result(module, inputs)
        try:
            return super().result(module, inputs)
        except TypeError as error:
            raise lacking from error
        except (UnsatisfiedAssumption, NotProvided) as error:
            if self._refuses(module, inputs):
                raise lacking from error
            raise

    def _refuses(self, module: Any, inputs: dict[str, Any]) -> bool:
        """True if it refuses these inputs in every FP8 type, but not in a type that is no FP8. Otherwise it refuses
        their sizes, or one FP8 type."""
        from ..refusals import NotProvided

        plain = getattr(torch, capabilities.current().dtypes[0])
        answered = []
        for dtype in (*FP8, plain):
            given = {
                name: value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in FP8 else value
                for name, value in inputs.items()
            }
            try:
                super().result(module, given)
            except (TypeError, UnsatisfiedAssumption, NotProvided):
                continue
            answered.append(dtype)
        return answered == [plain]
