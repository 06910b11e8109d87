"""Commands of jobs: forecast, schedule."""
