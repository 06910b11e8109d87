"""Importers that turn measurements of other programs into records."""
