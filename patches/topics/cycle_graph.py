from patches.engine import Around, Call, Topic, WrapCall

HOOKS = "sglang.srt.speculative.cycle_graph.hooks"
RELAY = "sglang/srt/managers/overlap_utils.py"

TOPIC = Topic(
    name="cycle-graph",
    why=(
        "Between its three graphs a cycle makes some seventy small launches and ten copies, and the device waits for the "
        "host that makes them; the whole cycle of a chain can be one launch."
    ),
    upstream="https://github.com/sgl-project/sglang/issues/29960",
    retire_when="upstream replays verify, accept, draft extend and draft as one graph",
    detect="with the topic off, a trace of a speculative step shows one graph launch",
    overlay=(
        "sglang/srt/speculative/cycle_graph/",
        # It counts its steps as these two do; their own topics come later in the series.
        "sglang/srt/speculative/graph_policy/",
        "sglang/srt/speculative/stats/",
    ),
    edits=(
        Around(
            file="sglang/srt/speculative/eagle_worker_v2.py",
            scope="EAGLEWorkerV2.forward_batch_generation",
            hook=f"{HOOKS}:cycle",
        ),
        Around(
            file="sglang/srt/managers/scheduler.py",
            scope="Scheduler.init_overlap",
            hook=f"{HOOKS}:overlap_ready",
        ),
        Around(file=RELAY, scope="FutureMap.publish", hook=f"{HOOKS}:publish"),
        Around(file=RELAY, scope="FutureMap.stash", hook=f"{HOOKS}:stash"),
        WrapCall(
            file="sglang/srt/model_executor/runner_backend/full_cuda_graph_backend.py",
            scope="FullCudaGraphBackend.capture_one",
            match=Call("CUDAGraph"),
            hook=f"{HOOKS}:new_graph",
        ),
    ),
)
