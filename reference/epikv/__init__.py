"""EpiKV: eviction by how much the model's representation changes with a token, without the attention matrix.

Paper: "Epiphany-Aware KV Cache Eviction Without the Attention Matrix" (arXiv 2606.26472).
"""

from .scores import hidden_change, kv_variance, lag_kv, rolling_mean, rolling_zscore, score, select

__all__ = ["hidden_change", "kv_variance", "lag_kv", "rolling_mean", "rolling_zscore", "score", "select"]
