from patches.engine import Around, Call, Topic, WrapCall

HOOKS = "sglang.srt.speculative.semantics.logprob_hooks"
SCORING = "sglang.srt.speculative.semantics.scoring_hooks"
PROCESSOR = "sglang/srt/layers/logprob_processor.py"
SAMPLER = "sglang/srt/layers/sampler.py"

TOPIC = Topic(
    name="run-logprobs",
    why=(
        "A batch in which one request asks for token_ids_logprob and another does not ends the scheduler in an "
        "AttributeError; a request for no token is told other log probabilities under speculation or beside a request "
        "that samples; log probabilities of a greedy request depend on whether a neighbour samples."
    ),
    upstream="none found",
    retire_when="upstream's result processors accept requests without chosen tokens, and it scores requests for no token alike",
    detect="with the topic off, requests with and without token_ids_logprob are served in one batch",
    overlay=(
        "sglang/srt/speculative/semantics/logprob_hooks.py",
        "sglang/srt/speculative/semantics/scoring_hooks.py",
    ),
    edits=(
        Around(file=PROCESSOR, scope="get_token_ids_logprobs", hook=f"{HOOKS}:chosen_tokens"),
        WrapCall(
            file=PROCESSOR,
            scope="compute_spec_v2_logprobs",
            match=Call("log_softmax", mentions=("temperatures",)),
            hook=f"{HOOKS}:sampled_log_softmax",
        ),
        Around(
            file="sglang/srt/sampling/sampling_batch_info.py",
            scope="SamplingBatchInfo.from_schedule_batch",
            hook=f"{HOOKS}:greedy_unscaled",
        ),
        Around(
            file="sglang/srt/model_executor/forward_batch_info.py",
            scope="ForwardBatch.init_new",
            hook=f"{SCORING}:mark",
        ),
        Around(file=SAMPLER, scope="Sampler._preprocess_logits", hook=f"{SCORING}:keep_scores"),
        Around(file=SAMPLER, scope="Sampler.forward", hook=f"{SCORING}:use_scores"),
        Around(file=SAMPLER, scope="Sampler.compute_logprobs_only", hook=f"{SCORING}:use_scores"),
        Around(
            file="sglang/srt/managers/scheduler_components/logprob_result_processor.py",
            scope="SchedulerLogprobResultProcessor.add_logprob_return_values",
            hook=f"{SCORING}:prefill_entries",
        ),
    ),
)
