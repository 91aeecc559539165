"""LongFlow's decode step with PyTorch's fused attention for the output."""

from __future__ import annotations

import types

from .... import Capabilities
from ..longflow import Fused

CAPABILITIES = Capabilities(validates_arguments=False)

longflow = types.SimpleNamespace(decode_attention=Fused())
