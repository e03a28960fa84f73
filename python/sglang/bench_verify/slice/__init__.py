"""The slice: what one rank of a tensor-parallel deployment runs, on one GPU.

A trillion-parameter model cannot be had for a bench, but one rank's share of it can: the heads, the
expert width and the vocabulary that rank would hold, all experts, the real hidden size, a few layers, and
dummy weights. Times of attention, MoE, launch and host are then those of the deployment; the all-reduce
is not in them.

Two things make a slice lie, and both are dealt with here. Dummy weights route every token to the same
experts, so that a verify reads no more experts than a decode: the router's logits are replaced by noise,
and the expert union is reported. And engines measured one after the other see different clocks: several
engines stay resident on the GPU and are measured in turn, forth and back.

Use from a script (``benchmark/slice_ab.py`` does)::

    from sglang.bench_verify.slice.engines import EngineSpec, Fleet
    from sglang.bench_verify.slice.shapes import NAMED, rank_slice

    shape = rank_slice(NAMED["kimi-k2.5"], tp=8, layers=12, experts=64)
    specs = [EngineSpec("upstream", topics_off=("verify-attention",)), EngineSpec("fork")]
    with Fleet(shape, specs, folder="/tmp/slice") as fleet:
        figures = fleet.measure("fork", context=16384, tokens=128)
"""
