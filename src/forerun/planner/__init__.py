"""From predictions to a choice: candidates, limits, the Pareto front, and why the others were left out."""
