"""What kind of thought a model is in, told from how little of its cache it looks at (sections 3.1, C.2, D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention import accumulate_dtype, attention_weights
from ..contract import resolve_scale
from .contract import Thought, Thresholds, check_edges
from .contract_thoughts import check_numbers, check_sparsity, check_traces, too_few_layers

if TYPE_CHECKING:
    import numpy as np

#: Thought types, so modes of the sparsity's distribution.
MODES = len(Thought)


def attention_sparsity(
    query: Tensor, key: Tensor, occupied: Tensor, *, threshold: float = 0.01, scale: float | None = None
) -> Tensor:
    """The share of the tokens that a decode step looks past, averaged over KV heads (section 3.1.2, C.2).

    query [B, Hq, D]; key [B, Hkv, S, D]; occupied [B, S] bool. A KV head looks past a token if the largest weight that
    any of its G query heads gives it lies strictly below `threshold` of the largest that they give any token; 0 <
    threshold < 1. scale defaults to D ** -0.5. Returns [B] float32 (float64 for float64), 0 for a row without tokens.
    TypeError, ValueError for bad arguments.
    """
    sizes = check_sparsity(query, key, occupied, threshold)
    scale = resolve_scale(scale, sizes.head_dim)
    weight = attention_weights(query, key, occupied, scale=scale)                       # [B, Hq, S]  eq. 2
    return sparsity_of(weight, occupied, sizes.key_value_heads, threshold)


def sparsity_of(weight: Tensor, occupied: Tensor, key_value_heads: int, threshold: float) -> Tensor:
    """The same of attention weights [B, Hq, S] at hand."""
    pooled = weight.unflatten(1, (key_value_heads, -1)).amax(2)                         # [B, Hkv, S]  eq. 3
    # Eq. 4 divides each row by its sum, which changes no ratio to the row's largest element.
    passed = (pooled < threshold * pooled.amax(-1, keepdim=True)) & occupied[:, None]
    tokens = occupied.sum(-1).clamp_min(1)[:, None].to(weight.dtype)
    return (passed.sum(-1).to(weight.dtype) / tokens).mean(1)


def classify(sparsity: Tensor, edges: tuple[float, float]) -> Tensor:
    """The thought type that goes with a sparsity (observation 1b): [...] floating -> [...] int64, see `Thought`.

    edges (theta_1, theta_2), ascending, rounded to float32 but for a float64 sparsity: transition from theta_2 on,
    reasoning from theta_1 on, else execution, as is NaN.
    """
    low, high = check_edges(edges)
    sparsity = check_numbers("sparsity", sparsity)
    sparsity = sparsity.to(accumulate_dtype(sparsity))
    thought = torch.where(sparsity >= low, int(Thought.REASONING), int(Thought.EXECUTION))
    return torch.where(sparsity >= high, int(Thought.TRANSITION), thought)


def calibrate(
    traces: Sequence[Tensor], *, layers: int = 4, grid: int = 513, bandwidth: float | None = None
) -> Thresholds:
    """Which layers tell thoughts apart, and where the thought types meet (section 3.1.3, D.1).

    traces: of each prompt the sparsity [all layers, steps] of its decode steps, floating, from 0 to 1. The density of
    each layer's sparsity is estimated with Gaussian kernels of `bandwidth` times its standard deviation (default:
    Scott's rule, steps ** -0.2) at `grid` equidistant points from 0 to 1. L*: the `layers` layers that have three modes
    in the most prompts, of equals the first. Edges: the densities' least points between their three modes (in the
    middle, if there are several), averaged over these prompts and layers. Needs scipy.

    ValueError where fewer than `layers` layers ever have three modes, which says how many modes each one has.
    """
    traces = check_traces(traces, layers, grid, bandwidth)
    found = [[_modes(row, grid, bandwidth) for row in trace.detach().double().cpu()] for trace in traces]
    counts = [[len(peaks) for peaks, _ in prompt] for prompt in found]                  # [prompts][all layers]
    votes = [sum(count == MODES for count in layer) for layer in zip(*counts, strict=True)]
    ranked = sorted(range(len(votes)), key=lambda layer: -votes[layer])                 # stable: the first of equals
    if votes[ranked[layers - 1]] == 0:
        raise too_few_layers(counts, layers, MODES)
    chosen = sorted(ranked[:layers])
    edges = [
        prompt[layer][1] for prompt in found for layer in chosen if len(prompt[layer][0]) == MODES
    ]
    low, high = (sum(edge) / len(edges) for edge in zip(*edges, strict=True))
    return Thresholds(tuple(chosen), (low, high))


def _modes(sparsity: Tensor, grid: int, bandwidth: float | None) -> tuple[list[int], list[float]]:
    """The modes of one layer's sparsity [steps], as grid points, and the least points between neighbours."""
    try:
        import numpy as np
        from scipy.stats import gaussian_kde
    except ImportError as error:
        raise ImportError(
            "calibrate needs scipy, which is not installed: python -m pip install 'kvtwin[calibrate]'"
        ) from error
    if bool((sparsity == sparsity[0]).all()):
        return [round(float(sparsity[0]) * (grid - 1))], []                             # no spread: a single spike
    place = np.linspace(0, 1, grid)
    density = gaussian_kde(sparsity.numpy(), bw_method=bandwidth)(place)
    peaks = _peaks(density)
    edges = []
    for left, right in pairwise(peaks):
        between = density[left:right + 1]
        lowest = np.flatnonzero(between == between.min())
        edges.append(float(place[left + lowest[0]] + place[left + lowest[-1]]) / 2)
    return peaks, edges


def _peaks(density: np.ndarray) -> list[int]:
    """Where a function on a grid is highest around, beyond the ends as well; a plateau is one peak, at its first
    point."""
    starts = [0, *(i for i in range(1, len(density)) if density[i] != density[i - 1])]
    height = [-1.0, *(float(density[i]) for i in starts), -1.0]
    return [
        start for start, before, here, after in zip(starts, height, height[1:], height[2:], strict=False)
        if before < here > after
    ]
