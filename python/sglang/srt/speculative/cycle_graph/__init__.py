"""One EAGLE-3 cycle of a chain as one graph launch.

Draft, target verify and draft extend stay the passes that upstream captured; between them stands glue of ours: small
steps over static buffers that do what upstream's Python does between its passes (verify inputs, accept, bookkeeping,
relay to the next cycle). ``program`` is the sequence, ``buffers`` the one owner of every tensor it touches, ``steps``
the glue in PyTorch for any device, ``kernels`` the same glue as Triton kernels, ``graphs`` the capture, ``admission``
the reasons for which a step takes upstream's way instead, and ``hooks`` what patched upstream lines call.

Nothing is kept from one cycle to the next but what upstream keeps itself (its ``FutureMap``, by request row), so
requests may join, finish, abort or be retracted between any two cycles.
"""
