"""Who gets which devices, and when is each job done: jobs, clusters, policies, placement and a simulator."""
