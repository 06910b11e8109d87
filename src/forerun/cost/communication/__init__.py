"""Time of moving data between devices: collectives, data parallel steps, parameter servers, fitted speed models."""
