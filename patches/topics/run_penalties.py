from patches.engine import Around, Topic

HOOKS = "sglang.srt.speculative.semantics.penalty_hooks"
ORCHESTRATOR = "sglang/srt/sampling/penaltylib/orchestrator.py"

TOPIC = Topic(
    name="run-penalties",
    why=(
        "Upstream tells the penalisers of the last token of a run only and penalises all rows of a verify alike: "
        "min_new_tokens 6 holds back the end token until 18 tokens are out, and two of three tokens are never penalised."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/22049",
    retire_when="upstream's penalisers advance by every committed token and apply per row of the verify",
    detect="with the topic off, min_new_tokens=6 holds the end token back for 6 tokens and not for 18",
    overlay=(
        "sglang/srt/speculative/semantics/penalty_hooks.py",
        "sglang/srt/speculative/semantics/penalty_rows.py",
    ),
    stacks_on=("run-sampling", "run-processors"),
    edits=(
        Around(file="sglang/srt/speculative/eagle_utils.py", scope="eagle_sample", hook=f"{HOOKS}:verify"),
        Around(
            file="sglang/srt/managers/schedule_batch.py",
            scope="ScheduleBatch.cumulate_penalty_output_tokens",
            hook=f"{HOOKS}:cumulate",
        ),
        Around(
            file="sglang/srt/sampling/sampling_batch_info.py",
            scope="SamplingBatchInfo.copy_for_forward",
            hook=f"{HOOKS}:keep_penalizers",
        ),
        Around(
            file=ORCHESTRATOR, scope="BatchedPenalizerOrchestrator.__init__", hook=f"{HOOKS}:seed_history"
        ),
        Around(file=ORCHESTRATOR, scope="BatchedPenalizerOrchestrator.apply", hook=f"{HOOKS}:apply_in_order"),
    ),
)
