"""Compares Keras with PyTorch, and studies replicas of TensorFlow."""
