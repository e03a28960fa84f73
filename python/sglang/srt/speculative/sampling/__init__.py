"""Speculative sampling rules as pure functions over probabilities, in PyTorch, for any device.

Nothing here knows a server: `filters` gives the distribution that plain decoding draws from, `rejection` accepts drafts
that were drawn from a known distribution so that the output is distributed as the target's.
"""
