"""The public types of SyncKV, which both sides share: config, results and head clusters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..arguments import check_flag, check_integer, check_ratio, check_scale

#: The format name and version in files that `HeadClusters.save` writes.
FORMAT, VERSION = "kvtwin head clusters", 1


@dataclass(frozen=True)
class SyncKVConfig:
    """Configuration of a SyncKV cache. R-heads are the representative heads; they attend to all tokens.

    k: the number of selected tokens that any other head attends to besides the newest ones.
    rho: the share of k in the static set, selected once by the last prompt token, from 0 to 1 (section 4.2; see
    `split_budget`).
    stride: m, decode steps from one anticipation to the next. phase: step t anticipates if m divides t + phase; from 0
    (the paper's) to m - 1. Layers with different phases do not use the link to host memory at the same step.
    clusters: N_r, the number of R-heads per layer.
    exclude_static: select the dynamic set among the tokens outside the static set. False follows eq. 6 literally.
    union_clusters: the other heads attend to the sets of all clusters (Algorithm 1, line 23), not only to those of
    their own cluster (eq. 7): up to clusters * k tokens.
    max_tokens: the longest sequence that a state can hold, prompt and decoded tokens.
    offload: keep the tokens of all other heads in host memory and only the selected ones on the GPU. The reference
    ignores this option.
    scale: the factor on query . key, by default head_dim ** -0.5.
    Raises TypeError or ValueError for invalid arguments.
    """

    k: int
    rho: float = 0.5
    stride: int = 5
    clusters: int = 2
    exclude_static: bool = field(default=True, kw_only=True)
    union_clusters: bool = field(default=False, kw_only=True)
    phase: int = field(default=0, kw_only=True)
    max_tokens: int = field(default=32768, kw_only=True)
    offload: bool = field(default=False, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("k", "stride", "clusters", "max_tokens"):
            check_integer(name, getattr(self, name), minimum=1)
        if check_integer("phase", self.phase, minimum=0) >= self.stride:
            raise ValueError(f"phase must be below the stride of {self.stride}, got {self.phase}")
        check_ratio("rho", self.rho)
        check_flag("exclude_static", self.exclude_static)
        check_flag("union_clusters", self.union_clusters)
        check_flag("offload", self.offload)
        check_scale("scale", self.scale)


class SyncKVSetsResult(NamedTuple):
    """The tokens that the last prompt token selects (eq. 3 and 4), ascending, then -1 if there are fewer.

    static: [B, N_r, k_static] int64, the best tokens, which remain selected. dynamic: [B, N_r, k_dynamic] int64, the
    next best tokens, which the first anticipation replaces.
    """

    static: Tensor
    dynamic: Tensor


@dataclass(frozen=True)
class HeadClusters:
    """The clusters of a layer's KV heads and the representative head (R-head) of each cluster.

    labels: the cluster of each KV head, 0 to N_r - 1. representatives: one head of each cluster.
    Raises TypeError or ValueError for clusters without heads and for representatives outside of their cluster.
    """

    labels: tuple[int, ...]
    representatives: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("labels", "representatives"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        clusters = len(self.representatives)
        if set(self.labels) != set(range(clusters)):
            raise ValueError(f"labels must name each of {clusters} clusters, and no other, got {self.labels}")
        for cluster, head in enumerate(self.representatives):
            if head >= len(self.labels) or self.labels[head] != cluster:
                raise ValueError(
                    f"representatives[{cluster}] must be a head of cluster {cluster} of {self.labels}, got {head}"
                )

    @staticmethod
    def save(path: str | PathLike[str], layers: Sequence[HeadClusters]) -> None:
        """Write the clusters of a model's layers, at least one, as a JSON file, first layer first."""
        rows = [{"labels": layer.labels, "representatives": layer.representatives} for layer in _layers(layers)]
        document = {"format": FORMAT, "version": VERSION, "layers": rows}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | PathLike[str]) -> tuple[HeadClusters, ...]:
        """Read a file that `save` wrote. ValueError, which names the file, for any other content."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"expected format {FORMAT!r}, version {VERSION}")
            return _layers([HeadClusters(**row) for row in document["layers"]])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path} must hold head clusters, got {type(error).__name__}: {error}") from error


def _layers(value: object) -> tuple[HeadClusters, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(layer, HeadClusters) for layer in value):
        raise TypeError(f"layers must be a sequence of HeadClusters, got {value!r}")
    if not value:
        raise ValueError("layers must be at least one HeadClusters, got none")
    return tuple(value)


def _numbers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not value:
        raise TypeError(f"{name} must be a tuple of ints, got {value!r}")
    return tuple(check_integer(f"{name}[{place}]", number, minimum=0) for place, number in enumerate(value))
