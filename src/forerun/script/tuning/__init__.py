"""Settings of a training script, tried within a budget: spaces, trials and the search for the best."""
