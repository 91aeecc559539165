"""LongFlow's decode steps over FP8 and over pages, which are gathered first."""

from __future__ import annotations

import types

from .... import Capabilities
from ..longflow_pages import Paged, Scaled

CAPABILITIES = Capabilities(validates_arguments=False)

longflow = types.SimpleNamespace(decode_attention=Scaled(), paged_decode_attention=Paged())
