"""Python loads this at the start of every process of the tests, for conftest puts its folder on the path.

A framework's import leaves a million objects and hardly a cycle among them: looking for some all the while is an eighth
of a short script's time. Scripts that are measured here are compared with each other, not with those of users.
"""

import gc

gc.set_threshold(100_000, 50, 100)
