from patches.engine import Assign, InsertAfter, Mentions, Topic

STREAMER = "sglang/srt/managers/scheduler_components/output_streamer.py"
ACCEPT = "_GenerationStreamAccumulator.accept"

TOPIC = Topic(
    name="run-stream",
    why=(
        "stream_interval above 1 streams only at output lengths of 1 modulo the interval; runs jump over those lengths, "
        "and a client may see nothing until its request ends."
    ),
    upstream="none found",
    retire_when="upstream counts tokens since the last streamed piece",
    detect="with the topic off, stream_interval=3 streams pieces while every run is 3 tokens long",
    not_needed=Mentions(STREAMER, ACCEPT, "num_unsent"),
    overlay=("sglang/srt/speculative/semantics/stream_hooks.py",),
    edits=(
        InsertAfter(
            file=STREAMER,
            scope=ACCEPT,
            match=Assign("should_output", mentions=("stream_interval",)),
            hook="sglang.srt.speculative.semantics.stream_hooks:due",
            args=("should_output", "req", "stream_interval"),
            assign="should_output",
        ),
    ),
)
