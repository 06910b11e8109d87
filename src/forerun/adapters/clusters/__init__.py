"""Running clusters: Slurm, Kubernetes, Ray, and the formats of their schedulers."""
