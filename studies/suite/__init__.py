"""``python -m studies suite``: predicts, measures for some minutes, compares."""
