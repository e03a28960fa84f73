from patches.engine import Around, Topic

TOPIC = Topic(
    name="run-processors",
    why="Upstream's verify never calls custom logit processors; a thinking budget or a token ban is silently ignored.",
    upstream="https://github.com/sgl-project/sglang/issues/10617",
    retire_when="upstream's verify calls custom logit processors for every row with that row's history",
    stacks_on=("run-sampling",),
    edits=(
        Around(
            file="sglang/srt/speculative/eagle_utils.py",
            scope="eagle_sample",
            hook="sglang.srt.speculative.semantics.processor_hooks:verify",
        ),
    ),
)
