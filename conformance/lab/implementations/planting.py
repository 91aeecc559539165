"""The variables that name the planted fault of planted.py, and the seed of its random numbers."""

from __future__ import annotations

NAME, SEED = "KVTWIN_PLANTED", "KVTWIN_PLANTED_SEED"
