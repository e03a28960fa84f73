from patches.engine import Around, Topic

TOPIC = Topic(
    name="run-sampling",
    why=(
        "Upstream's verify takes the argmax whatever the temperature on some devices, leaves out min_p everywhere, and "
        "joins top-k and top-p in another way than plain decoding; sampled output must have the target's distribution."
    ),
    upstream="https://github.com/sgl-project/sglang/issues/10617, https://github.com/sgl-project/sglang/pull/31214",
    retire_when="upstream's verify draws from the distribution of its own plain sampler on every device",
    detect="with the topic off, sampled verify passes a chi-square test against plain decoding, with min_p too",
    overlay=(
        "sglang/srt/speculative/sampling/",
        "sglang/srt/speculative/semantics/nonfinite.py",
        "sglang/srt/speculative/semantics/nonfinite_kernel.py",
        "sglang/srt/speculative/semantics/row_bias.py",
        "sglang/srt/speculative/semantics/row_sampling.py",
        "sglang/srt/speculative/semantics/sampling_hooks.py",
    ),
    edits=(
        Around(
            file="sglang/srt/speculative/eagle_utils.py",
            scope="eagle_sample",
            hook="sglang.srt.speculative.semantics.sampling_hooks:verify",
        ),
    ),
)
