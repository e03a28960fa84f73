from patches.engine import Around, Topic

HOOKS = "sglang.srt.speculative.semantics.nonfinite_hooks"
PROCESSOR = "sglang/srt/managers/scheduler_components/batch_result_processor.py"
SAMPLER = "sglang/srt/layers/sampler.py"

TOPIC = Topic(
    name="run-nonfinite",
    why=(
        "A row of NaN or infinite logits becomes an arbitrary token, an id outside the vocabulary, or an exception that "
        "ends the scheduler; it must end that request with a reason and leave the others alone."
    ),
    upstream="https://github.com/sgl-project/sglang/issues/32968",
    retire_when="upstream aborts single requests on non-finite logits",
    detect="with the topic off, a NaN row of a verify ends its own request with a reason and no other",
    overlay=(
        "sglang/srt/speculative/semantics/nonfinite_hooks.py",
        "sglang/srt/speculative/semantics/nonfinite_kernel.py",
        "sglang/srt/speculative/semantics/processor_guard.py",  # it asks there for the fault of a processor
    ),
    stacks_on=("run-sampling", "run-processors", "run-penalties", "run-end", "run-logprobs"),
    edits=(
        Around(file="sglang/srt/speculative/eagle_utils.py", scope="eagle_sample", hook=f"{HOOKS}:verify"),
        Around(file=SAMPLER, scope="Sampler._preprocess_logits", hook=f"{HOOKS}:guard_logits"),
        Around(file=SAMPLER, scope="Sampler.forward", hook=f"{HOOKS}:sample"),
        Around(
            file=PROCESSOR,
            scope="SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            hook=f"{HOOKS}:resolve_tokens",
        ),
        Around(
            file=PROCESSOR,
            scope="SchedulerBatchResultProcessor.process_batch_result_prefill",
            hook=f"{HOOKS}:process_single",
        ),
        Around(
            file=PROCESSOR,
            scope="SchedulerBatchResultProcessor.process_batch_result_decode",
            hook=f"{HOOKS}:process_single",
        ),
        Around(
            file="sglang/srt/managers/utils.py",
            scope="GenerationBatchResult.copy_to_cpu",
            hook=f"{HOOKS}:copy_to_host",
        ),
        Around(file="sglang/srt/mem_cache/common.py", scope="release_kv_cache", hook=f"{HOOKS}:release"),
    ),
)
