"""Scenarios of a training of SqueezeNet 1.1: what resolution, hyperparameters and hardware settings bring."""
