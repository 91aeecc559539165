"""LongFlow on the GPU: two launches per decode step, without synchronization with the host.

The first launch writes the new token and runs split-KV attention with an online softmax, all G query heads of a KV head
in one program. It stores the logits plus log2 ||v||_1. Tensor cores recompute these norms from the loaded values in
less time than it would take to read stored ones. With many KV heads, the last program of each KV head merges its splits
and turns its logits into log scores; otherwise the second launch does. The second launch picks the slot.
"""

from ...reference.contract import Pages
from ...reference.longflow import CompressResult, DecodeResult, LongFlowConfig
from .functions import compress_prefill, decode_attention, paged_decode_attention
from .state import LongFlowState

__all__ = [
    "CompressResult", "DecodeResult", "LongFlowConfig", "LongFlowState", "Pages", "compress_prefill",
    "decode_attention", "paged_decode_attention",
]
