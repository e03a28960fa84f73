"""Variables of CUDA and torch that upstream forces or that decide whether ranks can share memory."""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Setting

SETTINGS = (
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "int",
        "8 (upstream sets it)",
        "Hardware queues between host and GPU",
        "the CUDA driver, when a context is made",
        least=1,
        most=32,
    ),
    Setting(
        "CUDA_MODULE_LOADING",
        "choice",
        "AUTO (upstream sets it)",
        "Whether kernels are loaded at their first call (LAZY) or at once (EAGER)",
        "the CUDA driver",
        choices=("AUTO", "LAZY", "EAGER", "DEFAULT"),
    ),
    Setting(
        "CUDA_LAUNCH_BLOCKING",
        "flag",
        "0",
        "Every launch waits for its end: for finding errors only, and no graph can be captured",
        "the CUDA runtime",
    ),
    Setting(
        "CUDA_VISIBLE_DEVICES",
        "list",
        "(all)",
        "GPUs that a process may use, and their order",
        "the CUDA driver",
    ),
    Setting(
        "PYTORCH_CUDA_ALLOC_CONF",
        "text",
        "",
        "Torch's allocator; expandable_segments:True makes memory that no other rank can open",
        "torch",
    ),
    Setting("PYTORCH_ALLOC_CONF", "text", "", "The newer name of PYTORCH_CUDA_ALLOC_CONF", "torch"),
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "int",
        "3",
        "What torch does when a collective fails or times out",
        "torch",
        least=0,
        most=3,
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT", "flag", "0", "Waiting for a collective blocks the host thread", "torch"
    ),
    Setting(
        "SGLANG_NCCL_SO_PATH",
        "path",
        "(the one that torch loads)",
        "Another libnccl.so.2 for upstream's own NCCL calls",
        "sglang.srt.distributed, in every rank",
    ),
)
