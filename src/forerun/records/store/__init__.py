"""The record store: a database of measurements, and files of them."""
