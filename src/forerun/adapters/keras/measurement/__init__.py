"""Jobs with Keras on TensorFlow."""
