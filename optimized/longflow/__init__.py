"""LongFlow on the GPU: two launches per decode step, and nothing returns to the host.

The first writes the new token and runs split-KV attention with all G query heads of a KV head in one program and an
online softmax, and keeps the logits, log2 ||v||_1 added: norms are made anew from the values at hand, by tensor cores,
in less time than stored ones could be read. Splits are merged and logits become log scores as soon as all programs of a
KV head are done, where there are many heads, else in the second launch. That one picks the slot.
"""

from ...reference.longflow import CompressResult, DecodeResult, LongFlowConfig
from .functions import compress_prefill, decode_attention
from .state import LongFlowState

__all__ = [
    "CompressResult", "DecodeResult", "LongFlowConfig", "LongFlowState", "compress_prefill", "decode_attention",
]
