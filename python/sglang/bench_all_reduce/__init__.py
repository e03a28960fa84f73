"""Measures the all-reduce of this machine."""
