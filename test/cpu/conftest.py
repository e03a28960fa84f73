"""Settings of the tests of the CPU path."""

from hypothesis import settings

# Shared machines stall for longer than any deadline; a slow example says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
