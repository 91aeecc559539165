"""The reference methods as caches for Hugging Face transformers: `model.generate(past_key_values=LongFlowCache(...))`.

Importing this needs transformers (the extra `kvtwin[hf]`) and registers the attention "kvtwin" with it; see `plug`.
"""

from .longflow import LongFlowCache as LongFlowCache
