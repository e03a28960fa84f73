"""Gives the tests of this folder the servers of `cpu_servers`."""

from cpu_servers import serve

__all__ = ["serve"]
