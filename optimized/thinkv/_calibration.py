"""Densities of sparsities and their modes, for all layers of a prompt at once. Offline, in float64 on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

#: One per thought type.
MODES = 3
#: The largest number of differences between samples and grid points in memory at a time.
MAX_DIFFERENCES = 2**24


def modes(trace: Tensor, grid: int, bandwidth: float | None) -> tuple[Tensor, Tensor]:
    """trace [layers, steps] -> the number of modes of each layer, [layers], and the points of least density between
    them, [layers, 2], for layers with three modes (NaN for others)."""
    trace = trace.double()
    density = _densities(trace, grid, bandwidth)                                        # [layers, grid]
    peaks = _peaks(density)
    one = torch.zeros_like(peaks)
    one[:, 0] = True
    is_constant = (trace == trace[:, :1]).all(-1)                                       # no spread: a single mode
    peaks = torch.where(is_constant[:, None], one, peaks)
    count = peaks.sum(-1)
    edges = torch.full((len(trace), 2), torch.nan, dtype=torch.float64, device=trace.device)
    trimodal = count == MODES
    if bool(trimodal.any()):
        edges[trimodal] = _valleys(density[trimodal], peaks[trimodal])
    return count, edges


def average(found: Sequence[tuple[Tensor, Tensor]], chosen: Tensor) -> tuple[float, float]:
    """The mean edges of the chosen layers of all prompts, as far as they have three modes."""
    edges = torch.cat([edge[chosen.to(edge.device)].cpu() for _, edge in found])        # [prompts * chosen, 2]
    low, high = edges.nanmean(0).tolist()
    return low, high


def _densities(trace: Tensor, grid: int, bandwidth: float | None) -> Tensor:
    """Gaussian kernel density estimates of each row, at equidistant points from 0 to 1."""
    steps = trace.shape[1]
    factor = steps**-0.2 if bandwidth is None else bandwidth
    width = (trace.var(-1) * factor**2).sqrt()
    width = width.masked_fill(width == 0, 1)[:, None, None]                             # [layers, 1, 1]
    place = torch.linspace(0, 1, grid, dtype=torch.float64, device=trace.device)[:, None]
    density = torch.zeros(len(trace), grid, dtype=torch.float64, device=trace.device)
    for some in trace.split(max(1, MAX_DIFFERENCES // (len(trace) * grid)), dim=1):
        density += (-((place - some[:, None]) / width).square() / 2).exp().sum(-1)
    return density / (steps * width[..., 0] * sqrt(2 * torch.pi))


def _peaks(density: Tensor) -> Tensor:
    """The local maxima of each row, which is taken to be lower beyond both ends. A plateau is one maximum, at its first
    point."""
    low = density.new_full((len(density), 1), -1.0)
    outside = torch.cat((low, density, low), 1)
    index = torch.arange(density.shape[1], device=density.device).expand(density.shape)
    starts = density != outside[:, :-2]
    ends = density != outside[:, 2:]
    # The end of the plateau that begins here. Below, the point after it is compared.
    last = index.where(ends, density.shape[1]).flip(1).cummin(1).values.flip(1)
    return starts & (outside[:, :-2] < density) & (outside.gather(1, last + 2) < density)


def _valleys(density: Tensor, peaks: Tensor) -> Tensor:
    """The points of least density between the three peaks of each row; the middle of the first and the last one."""
    points = density.shape[1]
    place = torch.linspace(0, 1, points, dtype=torch.float64, device=density.device)
    index = torch.arange(points, device=density.device)
    at = peaks.nonzero()[:, 1].view(-1, MODES)
    edges = []
    for left, right in ((at[:, :1], at[:, 1:2]), (at[:, 1:2], at[:, 2:])):
        between = (index >= left) & (index <= right)
        lowest = density.masked_fill(~between, torch.inf)
        lowest = between & (density == lowest.amin(1, keepdim=True))
        first = index.expand(lowest.shape).where(lowest, points).amin(1)
        final = index.expand(lowest.shape).where(lowest, -1).amax(1)
        edges.append((place[first] + place[final]) / 2)
    return torch.stack(edges, 1)
