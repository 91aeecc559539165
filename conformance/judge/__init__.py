"""What is right: the float64 oracle, derived error bounds, comparators, lockstep, replay, and a checker per method."""
