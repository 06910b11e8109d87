"""Steps, epochs and jobs: the time of operations, memory and communication put together into an estimate."""
