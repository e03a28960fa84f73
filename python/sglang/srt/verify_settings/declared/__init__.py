"""Declarations, one module for each reader; a module holds ``SETTINGS``, a tuple of ``Setting``.

A new variable of the fork is declared in a module of its part here, and read with ``sglang.srt.verify_settings``.
"""
