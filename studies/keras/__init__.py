"""Keras beside PyTorch, and replicas of TensorFlow."""
