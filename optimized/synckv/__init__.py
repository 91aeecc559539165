"""SyncKV's functions on the GPU; semantics: `kvtwin.reference.synckv`."""

from ...reference.synckv.contract import HeadClusters, SyncKVSetsResult
from .heads import cluster_heads, head_similarity, overlap
from .sets import anticipate, initial_sets, split_budget

__all__ = [
    "HeadClusters", "SyncKVSetsResult", "anticipate", "cluster_heads", "head_similarity", "initial_sets", "overlap",
    "split_budget",
]
