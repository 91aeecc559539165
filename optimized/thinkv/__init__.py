"""ThinKV on the GPU. Semantics: `kvtwin.reference.thinkv`."""

from ...reference.contract.thinkv.config import ThinKVConfig
from ...reference.contract.thinkv.types import AnnealResult, Quantized, RepresentativesResult, Thought, Thresholds
from .eviction import anneal, segment_representatives, select_representatives
from .formats import dequantize, pack, quantize, unpack
from .paging import PagedAttentionResult, PagedCache, decode_attention
from .state import ThinKVState
from .thoughts import attention_sparsity, calibrate, classify

__all__ = [
    "AnnealResult", "PagedAttentionResult", "PagedCache", "Quantized", "RepresentativesResult", "ThinKVConfig",
    "ThinKVState", "Thought", "Thresholds", "anneal", "attention_sparsity", "calibrate", "classify",
    "decode_attention", "dequantize", "pack", "quantize", "segment_representatives", "select_representatives", "unpack",
]
