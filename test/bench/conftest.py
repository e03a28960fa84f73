"""Settings of the tests of the bench."""

from hypothesis import settings

# The machines that run these are shared: a slow example says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
