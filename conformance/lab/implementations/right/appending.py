"""TOVA's state, which appends new tokens and drops the evicted ones. It evicts after each block, by KV head."""

from __future__ import annotations

import types

from .... import Capabilities
from ..appending import AppendingTOVA

CAPABILITIES = Capabilities(
    slot_order="any", options={"interval": (1,), "per_head": (True,)}, validates_arguments=False
)

tova = types.SimpleNamespace(TOVAState=AppendingTOVA)
