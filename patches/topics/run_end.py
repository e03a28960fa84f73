from patches.engine import Around, Topic

TOPIC = Topic(
    name="run-end",
    why=(
        "Plain decoding looks at a request after every token. Upstream looks at a run of accepted tokens as a whole, "
        "so a stop or end token inside it loses against max_new_tokens and the text behind it leaks; tokens that are "
        "cut later stay in usage, acceptance counters and reasoning tokens."
    ),
    upstream="https://github.com/sgl-project/sglang/issues/31599, https://github.com/sgl-project/sglang/issues/39826",
    retire_when="upstream checks every token of an accepted run in order before it counts it",
    detect="with the topic off, a stop token inside an accepted run ends text and usage there",
    overlay=(
        "sglang/srt/speculative/semantics/__init__.py",
        "sglang/srt/speculative/semantics/accounting.py",
        "sglang/srt/speculative/semantics/run_end.py",
        "sglang/srt/speculative/semantics/run_end_hooks.py",
    ),
    edits=(
        Around(
            file="sglang/srt/managers/scheduler_components/batch_result_processor.py",
            scope="SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            hook="sglang.srt.speculative.semantics.run_end_hooks:resolve_tokens",
        ),
    ),
)
