"""Single layers: their sizes, their figures, and the design of their measurement."""
