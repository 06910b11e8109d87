"""Keras models, built and traced in a separate process."""
