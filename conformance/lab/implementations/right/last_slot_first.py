"""LongFlow's state with its slots in the reverse order."""

from __future__ import annotations

import types

from .... import Capabilities
from ..longflow_states import LastSlotFirst

CAPABILITIES = Capabilities(slot_order="any", validates_arguments=False)

longflow = types.SimpleNamespace(LongFlowState=LastSlotFirst)
