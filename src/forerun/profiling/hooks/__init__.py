"""What runs inside the user's process: standard library and the user's own framework, nothing else."""
