from patches.engine import Around, Topic

SERVER_ARGS = "sglang/srt/server_args.py"
HOOKS = "sglang.srt.speculative.arguments.hooks"

TOPIC = Topic(
    name="spec-arguments",
    why=(
        "A wrong speculative flag, or a draft that does not fit its target, ends in a TypeError, an empty "
        "AssertionError, or a failure after minutes of loading; it must be one sentence before any weight loads."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/22895, https://github.com/sgl-project/sglang/issues/36528",
    retire_when="upstream checks flags, target and draft against each other before it starts its processes",
    detect="with the topic off, a draft of another vocabulary is refused in a sentence before weights load",
    overlay=("sglang/srt/speculative/arguments/",),
    edits=(
        Around(file=SERVER_ARGS, scope="ServerArgs.__post_init__", hook=f"{HOOKS}:resolve"),
        Around(file=SERVER_ARGS, scope="ServerArgs.check_server_args", hook=f"{HOOKS}:launch"),
        Around(file=SERVER_ARGS, scope="prepare_server_args", hook=f"{HOOKS}:prepare"),
    ),
)
