"""The doctor: is this machine, with these packages and settings, able to serve, and what stands in the way.

``facts`` gathers what is so (bounded probes, no opinion), ``checks`` judges it (pure functions from facts to
findings), ``report`` shows it. Facts are a JSON document, so that a machine can be recorded once and judged
anywhere: ``--json`` writes it, ``--from`` reads it.

Only the standard library is imported here. Torch and the kernels are looked at in child processes: a library
that does not load, or that crashes while loading, is a finding and not the end of the doctor.
"""

from __future__ import annotations
