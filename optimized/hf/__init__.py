"""The optimized methods as caches for Hugging Face transformers: `model.generate(past_key_values=LongFlowCache(...))`.

Importing this needs transformers (the extra `kvtwin[hf]`) and registers the attention "kvtwin" with it, the one that
the reference's caches use too: a process can have both.
"""

from .longflow import LongFlowCache as LongFlowCache
