"""SyncKV: a few representative heads attend to all tokens and select tokens for the other heads.

Paper: "SyncKV: A Syncopated Scheduling Approach to KV Cache Compression for Efficient Long-Context LLM Inference".
"Head" means KV head. Similar heads form a cluster; the representative head of a cluster is its R-head.
"""

from ..contract.synckv.types import HeadClusters, SyncKVConfig, SyncKVSetsResult
from .heads import cluster_heads, head_similarity, overlap
from .sets import anticipate, initial_sets, split_budget
from .state import SyncKVState

__all__ = [
    "HeadClusters", "SyncKVConfig", "SyncKVSetsResult", "SyncKVState", "anticipate", "cluster_heads", "head_similarity",
    "initial_sets", "overlap", "split_budget",
]
