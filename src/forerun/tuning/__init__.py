"""Settings of a training script, tried within a budget: what they are, how they reach it, and which is best."""
