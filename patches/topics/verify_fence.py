from patches.engine import Around, Topic

FENCE = "sglang.srt.layers.attention.verify.fence:after_replay"

TOPIC = Topic(
    name="verify-fence",
    why=(
        "Upstream lets its scheduler write the request table once a pass has copied it, before the replay; the graphs "
        "of verify-attention read the table while they run, so the scheduler waits for the end of the replay instead."
    ),
    upstream="none: follows from verify-attention",
    retire_when="verify-attention is retired, or its graphs read a copy of the table",
    detect="a trace shows no kernel inside a replayed graph that reads the request table",
    edits=(
        Around(
            file="sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
            scope="DecodeCudaGraphRunner.execute",
            hook=FENCE,
        ),
        Around(
            file="sglang/srt/speculative/eagle_draft_extend_cuda_graph_runner.py",
            scope="EAGLEDraftExtendCudaGraphRunner.execute",
            hook=FENCE,
        ),
    ),
)
