from patches.engine import Around, Topic

HOOKS = "sglang.srt.speculative.semantics.logprob_hooks"

TOPIC = Topic(
    name="run-logprobs",
    why=(
        "A batch in which one request asks for token_ids_logprob and another does not ends the scheduler in an "
        "AttributeError; a request for no token gets the log probability of one under speculation."
    ),
    upstream="none found",
    retire_when="upstream's result processors accept requests without chosen tokens",
    detect="with the topic off, requests with and without token_ids_logprob are served in one batch",
    overlay=("sglang/srt/speculative/semantics/logprob_hooks.py",),
    edits=(
        Around(
            file="sglang/srt/layers/logprob_processor.py",
            scope="get_token_ids_logprobs",
            hook=f"{HOOKS}:chosen_tokens",
        ),
        Around(
            file="sglang/srt/managers/scheduler_components/logprob_result_processor.py",
            scope="SchedulerLogprobResultProcessor.add_logprob_return_values",
            hook=f"{HOOKS}:prefill_entries",
        ),
    ),
)
