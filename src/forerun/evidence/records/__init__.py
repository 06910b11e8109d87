"""Measured steps, each with its circumstances: the record, the store of records, importers of tables."""
