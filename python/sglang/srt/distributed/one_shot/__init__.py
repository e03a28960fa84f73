"""One-shot push all-reduce for ranks without NVLink (docs/all-reduce.md)."""
