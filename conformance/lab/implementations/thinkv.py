"""ThinKV: a right quantizer in plain PyTorch and one that truncates, attention of another scale, a state with a stale
block table, and a cache that takes one dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....reference import thinkv

# `select_representatives` is looked up where a state is defined: judge/checkers/thinkv_state.py.
from ....reference.thinkv import PagedCache, Quantized, ThinKVState, select_representatives

__all__ = [
    "OnlyFloat16", "Quantize", "StaleBlockTable", "StaleState", "Truncates", "provided", "select_representatives",
    "too_sharp",
]

LEVELS = {
    "nvfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), "int4": tuple(map(float, range(8))), "ternary": (0.0, 1.0),
    "int2": (0.0, 1.0),
    "fp8": tuple(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()),
}
BITS = {"fp8": 8, "nvfp4": 4, "int4": 4, "ternary": 2, "int2": 2}


def provided(**changed: Any) -> dict[str, Any]:
    """The reference's functions and classes, with some of them changed."""
    return {name: getattr(thinkv, name) for name in thinkv.__all__} | changed


class Quantize:
    """`quantize` with scale rule "amax", right. Subclasses override one method."""

    def __call__(
        self, x: Tensor, fmt: str, *, axis: int, group: int = 16, scale_rule: str | None = None,
        tensor_scale: bool = False,
    ) -> Quantized:
        if scale_rule == "mse" or tensor_scale:
            raise NotImplementedError("scale rule mse, and a scale of the tensor")
        shape, axis = x.shape, axis - x.dim() if axis >= 0 else axis
        if fmt == "unquantized":
            kept = (x.float() if x.dtype == torch.float64 else x).clone(memory_format=torch.contiguous_format)
            return Quantized(kept, torch.empty(0, dtype=torch.uint8, device=x.device), fmt, axis, group, shape)
        along = -2 if fmt == "fp8" else axis
        levels = torch.tensor(LEVELS[fmt], device=x.device)
        rows = x.float().transpose(along, -1)
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % group)).unflatten(-1, (-1, group))  # [..., n, group]
        size = rows.abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
        largest = size.amax((-1, -3), keepdim=True) if fmt == "fp8" else size.amax(-1, keepdim=True)
        scale = largest / levels[-1]
        if fmt != "fp8":
            scale = scale.clamp_max(448).to(torch.float8_e4m3fn)
        step = scale.float()
        index = self.index((size / step).where(step > 0, 0), levels)
        code = index | ((rows < 0) & (index > 0)).long() << (BITS[fmt] - 1)
        code = code.flatten(-2)[..., :shape[along]].transpose(along, -1).to(torch.uint8).contiguous()
        if fmt == "fp8":
            return Quantized(code, scale[..., 0, :, 0], fmt, axis, group, shape)
        scale = scale[..., 0].view(torch.uint8).transpose(along, -1).contiguous()
        return Quantized(code, scale, fmt, axis, group, shape)

    def index(self, ratio: Tensor, levels: Tensor) -> Tensor:
        """The nearest level, and the even one of two that are equally near."""
        ratio = ratio.clamp_max(levels[-1])
        above = torch.searchsorted(levels, ratio.contiguous())
        below = (above - 1).clamp_min(0)
        up, down = (levels[above].double() - ratio.double()).abs(), (ratio.double() - levels[below].double()).abs()
        return torch.where((up < down) | (up == down) & (above % 2 == 0), above, below)


class Truncates(Quantize):
    """Wrong: it takes the level below."""

    def index(self, ratio: Tensor, levels: Tensor) -> Tensor:
        return torch.searchsorted(levels, ratio.contiguous(), right=True) - 1


class StaleBlockTable(PagedCache):
    """Wrong: if an entry of the block table is opened again, attention goes on to read the pool of its first format, in
    which there is nothing."""

    def _flush(self, row: Any, kind: int, segment: int, slots: Any, blocks: Any, group: int) -> None:
        arrived = row.buffer
        super()._flush(row, kind, segment, slots, blocks, group)
        row.opened = getattr(row, "opened", {})
        for token in arrived:
            entry = token.slot // self.config.block
            if row.opened.setdefault(entry, self.config.format_of(kind)) != self.config.format_of(kind):
                token.key, token.value = torch.zeros_like(token.key), torch.zeros_like(token.value)


class StaleState(ThinKVState):
    def __init__(self, config: Any, *, query_heads: int, **sizes: Any) -> None:
        super().__init__(config, query_heads=query_heads, **sizes)
        self.cache = StaleBlockTable(config, **sizes)


def too_sharp(
    query: Tensor, cache: Any, *, scale: float | None = None, sparsity_mask: Tensor | None = None
) -> Any:
    """Wrong: a scale that is 5 % too large."""
    own = query.shape[-1] ** -0.5 if scale is None else scale
    return thinkv.decode_attention(query, cache, scale=1.05 * own, sparsity_mask=sparsity_mask)


class OnlyFloat16(PagedCache):
    """Right: it refuses other dtypes."""

    def __init__(self, config: Any, *, dtype: torch.dtype, **sizes: Any) -> None:
        if dtype != torch.float16:
            raise NotImplementedError(f"dtype {dtype}")
        super().__init__(config, dtype=dtype, **sizes)


class HalvesUp(Quantize):
    """Wrong: of two levels that are equally near, the larger one."""

    def index(self, ratio: Tensor, levels: Tensor) -> Tensor:
        halfway = (levels[1:] + levels[:-1]) / 2
        return torch.bucketize(ratio.contiguous(), halfway, right=True)


class LastGroupIsWhole(Quantize):
    """Wrong: numbers of the group before belong to a last group that is not full, too."""

    def __call__(self, x: Tensor, fmt: str, *, axis: int, group: int = 16, **options: Any) -> Quantized:
        along = x.dim() - 2 if fmt == "fp8" or axis in (-2, x.dim() - 2) else x.dim() - 1
        length, whole = x.shape[along], x.shape[along] // group * group
        found = super().__call__(x, fmt, axis=axis, group=group, **options)
        if fmt == "unquantized" or not whole or whole == length:
            return found
        tail = super().__call__(x.narrow(along, length - group, group), fmt, axis=axis, group=group, **options)
        at = along - x.dim() if fmt != "fp8" else -1
        found.codes.narrow(along, whole, length - whole).copy_(
            tail.codes.narrow(along, group - length + whole, length - whole)
        )
        found.scales.select(at, -1).copy_(tail.scales.select(at, -1))
        return found
