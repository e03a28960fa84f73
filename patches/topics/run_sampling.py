from patches.engine import Around, Topic

TOPIC = Topic(
    name="run-sampling",
    why=(
        "Upstream's verify takes the argmax whatever the temperature on some devices, leaves out min_p everywhere, and "
        "joins top-k and top-p in another way than plain decoding; sampled output must have the target's distribution."
    ),
    upstream="https://github.com/sgl-project/sglang/issues/10617, https://github.com/sgl-project/sglang/pull/31214",
    retire_when="upstream's verify draws from the distribution of its own plain sampler on every device",
    edits=(
        Around(
            file="sglang/srt/speculative/eagle_utils.py",
            scope="eagle_sample",
            hook="sglang.srt.speculative.semantics.sampling_hooks:verify",
        ),
    ),
)
