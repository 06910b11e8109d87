"""Memory of a training step: live bytes, the replay of the allocator, the peak, the largest batch that fits."""
