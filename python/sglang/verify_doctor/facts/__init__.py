"""What is so on this machine, as one JSON document.

Every section is optional: a probe that fails leaves its section with an ``error`` text, and the checks say
what could not be known. Sections: ``python``, ``host``, ``packages``, ``torch``, ``kernels``, ``nvidia``,
``pci``, ``environment``, ``fork``, and ``models`` where a model was named.
"""

from __future__ import annotations

from sglang.verify_doctor.facts.document import VERSION, Facts, gather, read, section, write

__all__ = ["VERSION", "Facts", "gather", "read", "section", "write"]
