"""SyncKV on the GPU. Semantics: `kvtwin.reference.synckv`."""

from ...reference.contract.synckv.types import HeadClusters, SyncKVConfig, SyncKVSetsResult
from .heads import cluster_heads, head_similarity, overlap
from .sets import anticipate, initial_sets, split_budget
from .state import SyncKVState

__all__ = [
    "HeadClusters", "SyncKVConfig", "SyncKVSetsResult", "SyncKVState", "anticipate", "cluster_heads", "head_similarity",
    "initial_sets", "overlap", "split_budget",
]
