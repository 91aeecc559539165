"""The command line of mutate.py."""

from __future__ import annotations

import sys

from .mutate import main

sys.exit(main())
