"""Studies of the time of operations, and the fit of the shipped weights."""
