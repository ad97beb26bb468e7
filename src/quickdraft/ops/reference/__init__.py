"""The oracle: every op as plain numpy, in float64 where the formula allows. Slow and readable."""
