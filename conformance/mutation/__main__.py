"""The command line of mutate.py; with "verdict" as the first argument, that of verdict_matrix.py."""

from __future__ import annotations

import sys

from . import mutate, verdict_matrix

sys.exit(verdict_matrix.main(sys.argv[2:]) if sys.argv[1:2] == ["verdict"] else mutate.main())
