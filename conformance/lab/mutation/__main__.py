"""The command line of mutate.py; with "verdict" or "claims" as the first argument, that of verdict_matrix.py or
claim_lane.py."""

from __future__ import annotations

import sys

from . import claim_lane, mutate, verdict_matrix

LANES = {"verdict": verdict_matrix.main, "claims": claim_lane.main}

lane = LANES.get(sys.argv[1] if len(sys.argv) > 1 else "")
sys.exit(lane(sys.argv[2:]) if lane else mutate.main())
