"""The record store: a database of measurements, and CSV and Parquet files of measurements."""
