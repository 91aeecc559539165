"""LongFlow's decode step in float64 throughout."""

from __future__ import annotations

import types

from .... import Capabilities
from ..longflow import Decode

CAPABILITIES = Capabilities(validates_arguments=False)

longflow = types.SimpleNamespace(decode_attention=Decode())
