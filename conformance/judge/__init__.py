"""The judge: float64 oracle, error bounds, comparators, statistics, lockstep, replay, and a checker per method."""
