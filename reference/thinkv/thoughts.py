"""Thought types, classified by the sparsity of attention (sections 3.1, C.2, D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._ranks import Heads
from ..attention import accumulate_dtype, attention_weights, sum_in_order
from ..contract.arguments import resolve_scale
from ..contract.thinkv.arguments import check_edges, check_numbers, check_sparsity, check_traces, too_few_layers
from ..contract.thinkv.types import Thought, Thresholds

if TYPE_CHECKING:
    import numpy as np

#: The number of modes in the distribution of the sparsity, one per thought type.
MODES = len(Thought)

ONE_RANK = Heads(None)


def attention_sparsity(
    query: Tensor, key: Tensor, occupied: Tensor, *, threshold: float = 0.01, scale: float | None = None,
    sparsity_of: str = "heads",
) -> Tensor:
    """The share of the tokens that a decode step does not attend to, over all KV heads (section 3.1.2, C.2).

    query [B, Hq, D]; key [B, Hkv, S, D]; occupied [B, S] bool; threshold: a number between 0 and 1; scale defaults to
    D ** -0.5. The weight of a token in a KV head is the largest that the G query heads give it, divided by the sum over
    all tokens. A token is not attended to if its weight is below `threshold` times the largest weight of any token.
    sparsity_of: "heads", the share in each KV head, averaged over the heads (section 3.1.3); "mean", the share in the
    weights that are averaged over the heads first (C.2). Returns [B] float32 (float64 for float64 inputs), 0 for a row
    without tokens. TypeError or ValueError for invalid arguments.
    """
    return sparsity_of_heads(query, key, occupied, threshold, scale, sparsity_of, ONE_RANK)


def sparsity_of_heads(
    query: Tensor, key: Tensor, occupied: Tensor, threshold: float, scale: float | None, sparsity_of: str, heads: Heads
) -> Tensor:
    """`attention_sparsity` over the KV heads of all ranks."""
    sizes = check_sparsity(query, key, occupied, threshold, sparsity_of)
    scale = resolve_scale(scale, sizes.head_dim)
    weight = attention_weights(query, key, occupied, scale=scale)                       # [B, Hq, S]  eq. 2
    return share_skipped(weight, occupied, sizes.key_value_heads, threshold, sparsity_of, heads)


def share_skipped(
    weight: Tensor, occupied: Tensor, key_value_heads: int, threshold: float, sparsity_of: str = "heads",
    heads: Heads = ONE_RANK,
) -> Tensor:
    """`attention_sparsity` of given attention weights: weight [B, Hq, S], occupied [B, S] bool -> [B]."""
    pooled = heads.largest(weight.unflatten(1, (key_value_heads, -1)).amax(2))          # [B, H, S]  eq. 3
    if sparsity_of == "mean":
        total = pooled.sum(-1, keepdim=True)
        pooled = sum_in_order(pooled / total.where(total > 0, 1), 1)[:, None] / total.shape[1]  # [B, 1, S]  eq. 4, C.2
    # Without a mean, eq. 4, which divides each row by its sum, does not change the ratios to the largest element.
    skipped = (pooled < threshold * pooled.amax(-1, keepdim=True)) & occupied[:, None]
    tokens = occupied.sum(-1).clamp_min(1)[:, None].to(weight.dtype)
    return (skipped.sum(-1).to(weight.dtype) / tokens).mean(1)


def classify(sparsity: Tensor, edges: tuple[float, float]) -> Tensor:
    """The thought type for a sparsity (observation 1b): [...] floating -> [...] int64, see `Thought`.

    edges: (theta_1, theta_2), ascending, rounded to float32 unless the sparsity is float64. Transition from theta_2 on,
    reasoning from theta_1 on, otherwise execution, also for NaN. TypeError or ValueError for invalid arguments.
    """
    low, high = check_edges(edges)
    sparsity = check_numbers("sparsity", sparsity)
    sparsity = sparsity.to(accumulate_dtype(sparsity))
    thought = torch.where(sparsity >= low, int(Thought.REASONING), int(Thought.EXECUTION))
    return torch.where(sparsity >= high, int(Thought.TRANSITION), thought)


def calibrate(
    traces: Sequence[Tensor], *, layers: int = 4, grid: int = 513, bandwidth: float | None = None
) -> Thresholds:
    """The layers whose sparsity separates the thought types, and the edges between the types (section 3.1.3, D.1).

    traces: for each prompt, the sparsity of its decode steps in every layer, [all layers, steps] floating, from 0 to 1.
    The density of each layer's sparsity is estimated at `grid` equidistant points from 0 to 1 with Gaussian kernels of
    `bandwidth` times the standard deviation (None: Scott's rule, steps ** -0.2). L*: the `layers` layers whose density
    has three modes in the most prompts, ties to the lowest layer. Each edge is the point of least density between two
    modes (the middle of a flat minimum), averaged over these prompts and layers. Requires scipy.

    TypeError or ValueError for invalid arguments. ValueError, with the number of modes of each layer, if fewer than
    `layers` layers have three modes in any prompt. ImportError without scipy.
    """
    traces = check_traces(traces, layers, grid, bandwidth)
    found = [[_modes(row, grid, bandwidth) for row in trace.detach().double().cpu()] for trace in traces]
    counts = [[len(peaks) for peaks, _ in prompt] for prompt in found]                  # [prompts][all layers]
    votes = [sum(count == MODES for count in layer) for layer in zip(*counts, strict=True)]
    ranked = sorted(range(len(votes)), key=lambda layer: -votes[layer])             # ties to the lowest layer
    if votes[ranked[layers - 1]] == 0:
        raise too_few_layers(counts, layers, MODES)
    chosen = sorted(ranked[:layers])
    edges = [
        prompt[layer][1] for prompt in found for layer in chosen if len(prompt[layer][0]) == MODES
    ]
    low, high = (sum(edge) / len(edges) for edge in zip(*edges, strict=True))
    return Thresholds(tuple(chosen), (low, high))


def _modes(sparsity: Tensor, grid: int, bandwidth: float | None) -> tuple[list[int], list[float]]:
    """The modes of one layer's sparsity [steps], as grid indices, and the points of least density between them."""
    try:
        import numpy as np
        from scipy.stats import gaussian_kde
    except ImportError as error:
        raise ImportError(
            "calibrate needs scipy, which is not installed: python -m pip install 'kvtwin[calibrate]'"
        ) from error
    if bool((sparsity == sparsity[0]).all()):
        return [round(float(sparsity[0]) * (grid - 1))], []                             # no spread: a single mode
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
    """The indices of the local maxima of a function on a grid, which is taken to be lower beyond both ends.

    A plateau is one maximum, at its first point.
    """
    starts = [0, *(i for i in range(1, len(density)) if density[i] != density[i - 1])]
    height = [-1.0, *(float(density[i]) for i in starts), -1.0]
    return [
        start for start, before, here, after in zip(starts, height, height[1:], height[2:], strict=False)
        if before < here > after
    ]
