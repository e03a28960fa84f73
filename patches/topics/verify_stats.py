from patches.engine import Around, Call, ReplaceArgument, Topic

HOOKS = "sglang.srt.speculative.stats.hooks"
WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
GRAPH_RUNNERS = (
    ("model_executor/runner/decode_cuda_graph_runner.py", "DecodeCudaGraphRunner"),
    ("speculative/eagle_draft_cuda_graph_runner.py", "EAGLEDraftCudaGraphRunner"),
    ("speculative/eagle_draft_extend_cuda_graph_runner.py", "EAGLEDraftExtendCudaGraphRunner"),
)
RESULTS = "sglang/srt/managers/scheduler_components/batch_result_processor.py"

TOPIC = Topic(
    name="verify-stats",
    why=(
        "A cycle that got slow cannot be repaired without knowing which of its phases did. Upstream times "
        "forward passes but neither accept, nor draft extend run eagerly, nor the gap between cycles, and it "
        "counts accepted tokens that lie behind the end of the request."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/33518",
    retire_when=(
        "upstream reports device times of every phase of a speculative cycle, accept lengths of kept tokens "
        "and a break-even"
    ),
    detect="with the topic off, the server's state holds device times of draft, verify, accept, draft extend",
    overlay=("sglang/bench_verify/", "sglang/srt/speculative/auto/plain.py"),
    stacks_on=(
        "verify-fence",
        "cycle-graph",
        "run-sampling",
        "run-processors",
        "run-penalties",
        "run-nonfinite",
        "run-hidden-states",
    ),
    edits=(
        Around(file=WORKER, scope="EAGLEWorkerV2.forward_batch_generation", hook=f"{HOOKS}:cycle"),
        Around(file=WORKER, scope="EAGLEWorkerV2.verify", hook=f"{HOOKS}:verify"),
        Around(file=WORKER, scope="EagleDraftWorker._draft_extend_for_decode", hook=f"{HOOKS}:draft_extend"),
        Around(file="sglang/srt/speculative/eagle_utils.py", scope="eagle_sample", hook=f"{HOOKS}:sample"),
        Around(
            file="sglang/srt/managers/tp_worker.py",
            scope="TpModelWorker.forward_batch_generation",
            hook=f"{HOOKS}:plain",
        ),
        Around(
            file=RESULTS,
            scope="SchedulerBatchResultProcessor._handle_finish_state_updated_req",
            hook=f"{HOOKS}:settled",
        ),
        Around(
            file="sglang/srt/managers/scheduler_components/metrics_reporter.py",
            scope="SchedulerMetricsReporter.report_decode_stats",
            hook=f"{HOOKS}:report",
        ),
        Around(
            file="sglang/srt/managers/scheduler.py",
            scope="Scheduler.init_model_worker",
            hook=f"{HOOKS}:workers_ready",
        ),
        Around(
            file="sglang/srt/managers/scheduler.py",
            scope="Scheduler.get_internal_state",
            hook=f"{HOOKS}:internal_state",
        ),
        Around(
            file="sglang/srt/managers/tokenizer_manager.py",
            scope="TokenizerManager._calculate_spec_decoding_metrics",
            hook=f"{HOOKS}:meta_info",
        ),
        *(
            Around(file=f"sglang/srt/{file}", scope=f"{runner}.{method}", hook=f"{HOOKS}:{hook}")
            for file, runner in GRAPH_RUNNERS
            for method, hook in (("can_run_graph", "may_replay"), ("execute", "replayed"))
        ),
        ReplaceArgument(
            file="sglang/srt/entrypoints/openai/serving_chat.py",
            scope="OpenAIServingChat._build_chat_response",
            match=Call("ChatCompletionResponse"),
            argument="metadata",
            hook="sglang.srt.speculative.stats.export:chat_metadata",
            args=("ret",),
        ),
    ),
)
