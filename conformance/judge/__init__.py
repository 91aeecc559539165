"""The judge: error bounds, comparators, lockstep, and a checker per method."""
