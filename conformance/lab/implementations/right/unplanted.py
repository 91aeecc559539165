"""What faults are planted in (faults.py), without a fault."""

from __future__ import annotations

import types

from .... import Capabilities
from ..faults import Fast
from ..longflow_states import LongFlow
from ..others import Compress

CAPABILITIES = Capabilities(validates_arguments=False)

longflow = types.SimpleNamespace(decode_attention=Fast(), LongFlowState=LongFlow)
snapkv = types.SimpleNamespace(compress=Compress())
