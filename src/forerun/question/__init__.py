"""The question: a user's words become one frozen ``Run``, with the devices, clusters and prices that it names.

A setting is one field of a part of the run (``settings``); ``Run.of`` reads a user's words, ``run.with_`` changes them
and ``run.json_fields`` says them again. The room knows nothing of models' insides, of costs or of frameworks.
"""
