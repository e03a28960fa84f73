from patches.engine import AddField, Around, Topic

HOOKS = "sglang.srt.speculative.graph_policy.hooks"
SERVER_ARGS = "sglang/srt/server_args.py"

TOPIC = Topic(
    name="verify-graph",
    why=(
        "A verify that falls off its graph costs twenty times as much on a slice of Kimi-K2 and says nothing; the "
        "user chooses whether that may happen, sees what was captured and how often it was not enough."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/33900, https://github.com/sgl-project/sglang/issues/3430",
    retire_when="upstream counts eager steps by reason, has a switch that forbids them, and names what a capture needs",
    detect="with the topic off, --speculative-verify-graph require refuses to start with --disable-cuda-graph",
    stacks_on=("spec-arguments", "nccl-settings", "verify-stats"),
    edits=(
        AddField(
            file=SERVER_ARGS,
            scope="ServerArgs",
            name="speculative_verify_graph",
            annotation=(
                'A[str, Arg(help="Whether target verify must replay a CUDA graph: auto counts eager steps by reason, '
                'require refuses them, off runs verify eager.", choices=["auto", "require", "off"]), NS("spec")]'
            ),
            default='"auto"',
        ),
        Around(file=SERVER_ARGS, scope="ServerArgs.__post_init__", hook=f"{HOOKS}:resolve"),
        Around(
            file="sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
            scope="DecodeCudaGraphRunner.can_run_graph",
            hook=f"{HOOKS}:may_replay",
        ),
        Around(
            file="sglang/srt/model_executor/model_runner_components/cuda_graph_setup.py",
            scope="capture_decode_graph",
            hook=f"{HOOKS}:capture_target",
        ),
        Around(
            file="sglang/srt/speculative/eagle_draft_cuda_graph_runner.py",
            scope="EAGLEDraftCudaGraphRunner.__init__",
            hook=f"{HOOKS}:capture_draft",
        ),
        Around(
            file="sglang/srt/speculative/eagle_draft_extend_cuda_graph_runner.py",
            scope="EAGLEDraftExtendCudaGraphRunner.__init__",
            hook=f"{HOOKS}:capture_draft",
        ),
        Around(
            file="sglang/srt/managers/scheduler.py",
            scope="Scheduler.get_internal_state",
            hook=f"{HOOKS}:internal_state",
        ),
    ),
)
