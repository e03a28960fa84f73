"""Predicts the cycle of a full deployment from its parts.

``python -m benchmark.model`` prints the validation against the H200 slice, the field report, and predictions for
8x RTX PRO 6000 and 8x H200. A phase is a sum over kernels: bytes over achieved bandwidth, plus a fixed cost a kernel,
plus attention and all-reduce, which have curves of their own. Every constant says where it was measured or cited.
"""
