"""Devices of each job and the time when it is done: jobs, clusters, policies, placement and a simulator."""
