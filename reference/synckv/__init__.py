"""SyncKV's functions: which tokens a few heads find important, for the heads that are like them.

Paper: "SyncKV: A Syncopated Scheduling Approach to KV Cache Compression for Efficient Long-Context LLM Inference".
Heads here are KV heads; R-heads the representative ones, one per cluster.
"""

from .contract import HeadClusters, SyncKVConfig, SyncKVSetsResult
from .heads import cluster_heads, head_similarity, overlap
from .sets import anticipate, initial_sets, split_budget
from .state import SyncKVState

__all__ = [
    "HeadClusters", "SyncKVConfig", "SyncKVSetsResult", "SyncKVState", "anticipate", "cluster_heads", "head_similarity",
    "initial_sets", "overlap", "split_budget",
]
