from patches.engine import Around, Call, Topic, WrapCall

HOOKS = "sglang.srt.speculative.semantics.processor_guard_hooks"

TOPIC = Topic(
    name="run-processor-guard",
    why=(
        "A custom_logit_processor that is no serialised object, that the server cannot import, or that raises ends the "
        "scheduler and everybody's requests with it, with and without speculation."
    ),
    upstream="none: no report was found",
    retire_when="upstream answers a processor that cannot be loaded or raises by ending that request only",
    detect='with the topic off, {"custom_logit_processor": "x"} is answered with 400 and the server goes on',
    overlay=(
        "sglang/srt/speculative/semantics/processor_guard.py",
        "sglang/srt/speculative/semantics/processor_guard_hooks.py",
    ),
    stacks_on=("run-limits",),
    edits=(
        Around(
            file="sglang/srt/managers/tokenizer_manager.py",
            scope="TokenizerManager._validate_one_request",
            hook=f"{HOOKS}:check_request",
        ),
        Around(
            file="sglang/srt/managers/scheduler.py",
            scope="Scheduler._add_request_to_queue",
            hook=f"{HOOKS}:admit",
        ),
        WrapCall(
            file="sglang/srt/sampling/sampling_batch_info.py",
            scope="SamplingBatchInfo.from_schedule_batch",
            match=Call("from_str"),
            hook=f"{HOOKS}:guarded",
        ),
    ),
)
