"""The planted fault (faults.py) that the variable KVTWIN_PLANTED names, with the seed KVTWIN_PLANTED_SEED, by default
0. ImportError without a fault."""

from __future__ import annotations

import os

from ... import Capabilities
from .faults import FAULTS
from .planting import NAME, SEED

CAPABILITIES = Capabilities(validates_arguments=False)

if os.environ.get(NAME) not in FAULTS:
    raise ImportError(f"{NAME} must be one of {', '.join(FAULTS)}, got {os.environ.get(NAME)!r}")
FAULT = FAULTS[os.environ[NAME]]
globals()[FAULT.method] = FAULT.provided(int(os.environ.get(SEED, "0")))
