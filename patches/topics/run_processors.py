from patches.engine import Around, Mentions, Topic

FILE = "sglang/srt/speculative/eagle_utils.py"

TOPIC = Topic(
    name="run-processors",
    why="Upstream's verify never calls custom logit processors; a thinking budget or a token ban is silently ignored.",
    upstream="https://github.com/sgl-project/sglang/issues/10617",
    retire_when="upstream's verify calls custom logit processors for every row with that row's history",
    detect="with the topic off, a processor that bans a token keeps it out of speculative output",
    # Two callers would apply every processor twice.
    not_needed=Mentions(FILE, "eagle_sample", "apply_custom_logit_processor"),
    overlay=(
        "sglang/srt/speculative/semantics/processor_hooks.py",
        "sglang/srt/speculative/semantics/row_history.py",
        "sglang/srt/speculative/semantics/verify_tree.py",
    ),
    stacks_on=("run-sampling",),
    edits=(
        Around(
            file=FILE,
            scope="eagle_sample",
            hook="sglang.srt.speculative.semantics.processor_hooks:verify",
        ),
    ),
)
