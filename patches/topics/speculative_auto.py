from patches.engine import AddField, Around, Topic

HOOKS = "sglang.srt.speculative.auto.hooks"
SCHEDULER = "sglang/srt/managers/scheduler.py"
WORKER = "sglang/srt/speculative/eagle_worker_v2.py"

TOPIC = Topic(
    name="speculative-auto",
    why=(
        "A draft that is not accepted makes every token dearer, and a server that speculates has no plain decode "
        "graph to fall back to; with both captured, live times decide which one runs."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/25696",
    retire_when="upstream's adaptive speculation captures plain decode and chooses it by measured times",
    detect="with the topic off, a draft that accepts nothing decodes as fast as no draft at all",
    # The exchange is the all-reduce's, which comes later in the series.
    overlay=(
        "sglang/srt/speculative/auto/",
        "sglang/srt/distributed/one_shot/exchange.py",
    ),
    stacks_on=("run-end", "run-nonfinite", "cycle-graph", "nccl-settings", "verify-stats", "verify-graph"),
    edits=(
        AddField(
            file="sglang/srt/server_args.py",
            scope="ServerArgs",
            name="speculative_auto",
            annotation=(
                'A[str, Arg(help="Whether steps fall back to plain decode while live times say that speculation '
                'loses.", choices=["off", "on"]), NS("spec")]'
            ),
            default='"on"',
        ),
        Around(file=WORKER, scope="EAGLEWorkerV2.forward_batch_generation", hook=f"{HOOKS}:step"),
        Around(file=WORKER, scope="EAGLEWorkerV2.init_cuda_graphs", hook=f"{HOOKS}:graphs_ready"),
        Around(
            file="sglang/srt/managers/scheduler_components/batch_result_processor.py",
            scope="SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            hook=f"{HOOKS}:resolve_tokens",
        ),
        Around(
            file="sglang/srt/managers/scheduler_components/metrics_reporter.py",
            scope="SchedulerMetricsReporter.update_spec_metrics",
            hook=f"{HOOKS}:spec_metrics",
        ),
        Around(
            file="sglang/srt/managers/scheduler_components/metrics_reporter.py",
            scope="SchedulerMetricsReporter.report_decode_stats",
            hook=f"{HOOKS}:decode_stats",
        ),
        Around(
            file="sglang/srt/speculative/eagle_utils.py",
            scope="eagle_prepare_for_decode",
            hook="sglang.srt.speculative.auto.reserve:prepare",
        ),
        Around(
            file="sglang/srt/managers/schedule_batch.py",
            scope="Req.effective_kv_committed_len",
            hook=f"{HOOKS}:committed",
        ),
        Around(file=SCHEDULER, scope="Scheduler.get_internal_state", hook=f"{HOOKS}:internal_state"),
    ),
)
