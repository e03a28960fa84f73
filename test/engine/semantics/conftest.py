"""Upstream compiles some sampling helpers at their first call; for these small tensors that takes minutes."""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
