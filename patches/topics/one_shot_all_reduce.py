from patches.engine import Around, Call, Topic, WrapCall

HOOKS = "sglang.srt.distributed.one_shot.hooks"
GROUPS = "sglang/srt/distributed/parallel_state.py"
NORMS = "sglang/srt/layers/layernorm.py"
RUNNERS = "sglang/srt/model_executor/runner"

TOPIC = Topic(
    name="one-shot-all-reduce",
    why=(
        "On more than two GPUs without NVLink upstream leaves every small reduction to NCCL and never fuses it with "
        "the norm behind it; a one-shot push all-reduce takes a fraction of the time. A rank that dies or fails in a "
        "capture leaves the others waiting, and a refused fused norm goes on without any reduction."
    ),
    upstream="https://github.com/sgl-project/sglang/issues/34528",
    retire_when=(
        "upstream has a push all-reduce for PCIe, fused with the norm, whose data path is tried before it is used"
    ),
    detect="with the topic off, bench_all_reduce shows upstream's own all-reduce as fast as ours on PCIe",
    overlay=("sglang/srt/distributed/one_shot/", "sglang/bench_all_reduce/"),
    stacks_on=("verify-stats", "verify-graph", "speculative-auto"),
    edits=(
        Around(file=GROUPS, scope="GroupCoordinator.__init__", hook=f"{HOOKS}:init_group"),
        Around(file=GROUPS, scope="GroupCoordinator.all_reduce", hook=f"{HOOKS}:all_reduce"),
        Around(
            file="sglang/srt/layers/communicator.py",
            scope="apply_flashinfer_allreduce_fusion",
            hook=f"{HOOKS}:announces_fusion",
        ),
        Around(file=NORMS, scope="_forward_with_allreduce_fusion", hook=f"{HOOKS}:fused_norm"),
        WrapCall(
            file=NORMS,
            scope="_forward_with_allreduce_fusion",
            match=Call("flashinfer_allreduce_residual_rmsnorm"),
            hook=f"{HOOKS}:stock_kernel",
        ),
        Around(
            file=f"{RUNNERS}/base_runner.py",
            scope="BaseRunner._pre_initialize_flashinfer_allreduce_workspace",
            hook=f"{HOOKS}:fusion_workspace",
        ),
        Around(
            file=f"{RUNNERS}/decode_cuda_graph_runner.py",
            scope="DecodeCudaGraphRunner.capture",
            hook=f"{HOOKS}:capture_graphs",
        ),
        Around(
            file=f"{RUNNERS}/decode_cuda_graph_runner.py",
            scope="DecodeCudaGraphRunner._capture_one_stream",
            hook=f"{HOOKS}:capture_stream",
        ),
        Around(
            file=f"{RUNNERS}/prefill_cuda_graph_runner.py",
            scope="PrefillCudaGraphRunner.capture",
            hook=f"{HOOKS}:capture_graphs",
        ),
        Around(
            file="sglang/srt/managers/scheduler.py",
            scope="Scheduler.get_internal_state",
            hook=f"{HOOKS}:internal_state",
        ),
        Around(
            file="sglang/srt/managers/tokenizer_manager.py",
            scope="TokenizerManager.dump_requests_before_crash",
            hook=f"{HOOKS}:crash_dump",
        ),
    ),
)
