"""Attention for EAGLE speculative decoding on a CPU, and the float32 oracle the GPU kernels are held to.

`reference` is the oracle: plain loops, no import but torch. `plan` says which KV slots and which mask each query
sees; `attend` computes, batched; `backend` binds both to upstream's attention interface. `docs/cpu.md` has the
contract.
"""
