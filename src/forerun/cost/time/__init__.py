"""Time of operations: features of kernels, the fitted law, its weights, and corrections to one device."""
