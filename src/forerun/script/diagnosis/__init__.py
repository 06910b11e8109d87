"""Causes of slow steps: traces read into arrays, compared with a prediction, and judged cause by cause."""
