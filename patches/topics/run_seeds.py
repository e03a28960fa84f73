from patches.engine import Around, Topic

HOOKS = "sglang.srt.speculative.semantics.seed_hooks"
INFO = "sglang/srt/sampling/sampling_batch_info.py"

TOPIC = Topic(
    name="run-seeds",
    why=(
        "A request's seed is honoured only in a mode that no CPU backend may enter, so a seeded text cannot be compared "
        "with and without speculation; with a seed, min_p ends the scheduler in an assertion."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/30822, for --enable-deterministic-inference only",
    retire_when="upstream honours sampling_seed on the pytorch sampling backend without the deterministic mode",
    detect="with the topic off, a seed gives the same text with and without speculation",
    overlay=(
        "sglang/srt/speculative/semantics/seed_hash.py",
        "sglang/srt/speculative/semantics/seed_hooks.py",
    ),
    stacks_on=("run-logprobs",),
    edits=(
        Around(file=INFO, scope="SamplingBatchInfo.from_schedule_batch", hook=f"{HOOKS}:seed_batch"),
        Around(file=INFO, scope="SamplingBatchInfo.merge_batch", hook=f"{HOOKS}:merge"),
        Around(
            file="sglang/kernels/ops/sampling/murmur_hash.py",
            scope="murmur_hash32",
            hook=f"{HOOKS}:hash_columns",
        ),
        Around(
            file="sglang/srt/layers/sampler.py",
            scope="top_k_top_p_min_p_sampling_from_probs_torch",
            hook=f"{HOOKS}:draw_filtered",
        ),
    ),
)
