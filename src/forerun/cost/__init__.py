"""Graph and device to seconds, bytes and joules: laws of time, memory, communication and power."""
