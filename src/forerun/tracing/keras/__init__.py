"""Keras models, built and traced in a process of their own."""
