"""The operation graph of one training step: plain numbers, no framework."""
