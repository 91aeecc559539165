"""KIVI's and PM-KVQ's quantizers in plain PyTorch, right ones, and subclasses that are wrong in one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Quantize:
    """KIVI's `quantize`, right. Subclasses override one method."""

    def __call__(self, x: Tensor, *, bits: int, axis: int, group: int, dtype: torch.dtype | None = None) -> Any:
        kind, axis = dtype or x.dtype, self.axis(axis)
        parts = x.float().transpose(axis, -1).unflatten(-1, (-1, group))       # [B, H, lines, groups, size]
        code, scale, minimum = self.groups(parts, 2**bits - 1, kind, kind)
        room = -group % (32 // bits) if axis == -2 else 0
        words = torch.nn.functional.pad(code, (0, room)).flatten(-2).unflatten(-1, (-1, 32 // bits))
        words = (words << bits * torch.arange(32 // bits, device=x.device)).sum(-1).to(torch.int32)
        return tuple(part.transpose(axis, -1) for part in (words, scale, minimum))

    def axis(self, axis: int) -> int:
        return axis

    def groups(
        self, x: Tensor, most: int, of_scale: torch.dtype, of_minimum: torch.dtype, least: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [..., groups, size], scales and minima [..., groups]."""
        low, high = x.amin(-1), x.amax(-1)
        scale, minimum = self.scale(low, high, most).clamp_min(least).to(of_scale), low.to(of_minimum)
        holds = (high - low).isfinite() & scale.isfinite() & minimum.isfinite()
        scale, minimum = scale.where(holds, 0), minimum.where(holds, torch.nan)
        step = scale.float()[..., None]
        code = self.code(self.ratio(x - minimum.float()[..., None], step), most).where(step > 0, 0).long()
        return code, scale, minimum

    def scale(self, low: Tensor, high: Tensor, most: int) -> Tensor:
        return (high - low) / most

    def ratio(self, apart: Tensor, step: Tensor) -> Tensor:
        return apart / step

    def code(self, ratio: Tensor, most: int) -> Tensor:
        return ratio.round().clamp(0, most)


class ByReciprocals(Quantize):
    """Right: it multiplies by rounded reciprocals."""

    def scale(self, low: Tensor, high: Tensor, most: int) -> Tensor:
        return (high - low) * (1 / torch.tensor(float(most), device=low.device))

    def ratio(self, apart: Tensor, step: Tensor) -> Tensor:
        return (apart * (1 / step)).where((1 / step).isfinite(), apart / step)


class InDouble(Quantize):
    """Right: it divides in float64."""

    def scale(self, low: Tensor, high: Tensor, most: int) -> Tensor:
        return (high.double() - low.double()) / most

    def ratio(self, apart: Tensor, step: Tensor) -> Tensor:
        return apart.double() / step.double()


class Dequantize:
    """KIVI's `dequantize`, right."""

    def __call__(
        self, codes: Tensor, scale: Tensor, minimum: Tensor, *, bits: int, axis: int, group: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        words = codes.transpose(axis, -1)[..., None]
        code = (words >> bits * torch.arange(32 // bits, device=codes.device)) & 2**bits - 1
        groups = scale.shape[axis]
        code = code.flatten(-2).unflatten(-1, (groups, -1))[..., :group].double()
        step, low = (part.transpose(axis, -1).double()[..., None] for part in (scale, minimum))
        return self.number(code, step, low).flatten(-2).transpose(axis, -1).to(dtype or scale.dtype)

    def number(self, code: Tensor, step: Tensor, low: Tensor) -> Tensor:
        return code * step + low


class PMQuantize(Quantize):
    """PM-KVQ's `quantize`, right."""

    def __call__(  # type: ignore[override]
        self, x: Tensor, *, bits: int = 16, group: int = 128, least_scale: float = 0.0, dtype: torch.dtype | None = None
    ) -> Any:
        kind = dtype or x.dtype
        parts = x.float().unflatten(-1, (max(1, x.shape[-1] // group), -1))
        of_scale = torch.float32 if kind == torch.float16 else kind
        code, scale, minimum = self.groups(parts, 2**bits - 1, of_scale, kind, least_scale)
        return {"codes": code.flatten(-2).to(torch.int32), "scale": scale, "minimum": minimum}


# Wrong ones -----------------------------------------------------------------------------------------------------------


class HalvesUp(Quantize):
    def code(self, ratio: Tensor, most: int) -> Tensor:
        return (ratio + 0.5).floor().clamp(0, most)


class PMHalvesUp(HalvesUp, PMQuantize):
    pass


class Floors(Quantize):
    def code(self, ratio: Tensor, most: int) -> Tensor:
        return ratio.floor().clamp(0, most)


class LosesTheLargestCode(Quantize):
    def code(self, ratio: Tensor, most: int) -> Tensor:
        return ratio.round().clamp(0, most - 1)


class ScalesByTheLargest(Quantize):
    """The scale is that of symmetric codes."""

    def scale(self, low: Tensor, high: Tensor, most: int) -> Tensor:
        return torch.maximum(low.abs(), high.abs()) / most


class ConstantIsNaN(Quantize):
    """0 / 0 in a constant group, whose scale becomes NaN."""

    def scale(self, low: Tensor, high: Tensor, most: int) -> Tensor:
        return super().scale(low, high, most).masked_fill(high == low, torch.nan)


class ScaleBeforeItIsStored(Quantize):
    """The codes are computed with the scale in float32, before it is rounded."""

    def groups(self, x: Tensor, most: int, of_scale: torch.dtype, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
        code, scale, minimum = super().groups(x, most, torch.float32, *more)
        return code, scale.to(of_scale), minimum


class OtherAxis(Quantize):
    def axis(self, axis: int) -> int:
        return -3 - axis


class LastGroupIsDropped(Quantize):
    def groups(self, x: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
        code, scale, minimum = super().groups(x, *more)
        if x.shape[-2] > 2:
            for part in (code, scale, minimum):
                part[:, :, :, -1] = 0
        return code, scale, minimum


class InHalfPrecision(Quantize):
    """Differences and quotients of 16-bit numbers are rounded to 16 bits."""

    def __call__(self, x: Tensor, **options: Any) -> Any:
        self.kind = x.dtype
        return super().__call__(x, **options)

    def scale(self, low: Tensor, high: Tensor, most: int) -> Tensor:
        return super().scale(low.to(self.kind), high.to(self.kind), most).float()


class Contiguous(Quantize):
    """It takes the strides of a contiguous tensor."""

    def __call__(self, x: Tensor, **options: Any) -> Any:
        if x.untyped_storage().nbytes() >= x.numel() * x.element_size():
            x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
        return super().__call__(x, **options)


class MinimumFirst(Dequantize):
    """It adds the minimum to the code, not to the product."""

    def number(self, code: Tensor, step: Tensor, low: Tensor) -> Tensor:
        return (code + low) * step
