"""Measures the all-reduce of this machine and writes the table that a server reads (docs/all-reduce.md)."""
