from patches.engine import Assign, InsertAfter, Topic

TOPIC = Topic(
    name="run-stream",
    why=(
        "stream_interval above 1 streams only at output lengths of 1 modulo the interval; runs jump over those lengths, "
        "and a client may see nothing until its request ends."
    ),
    upstream="none found",
    retire_when="upstream counts tokens since the last streamed piece",
    edits=(
        InsertAfter(
            file="sglang/srt/managers/scheduler_components/output_streamer.py",
            scope="_GenerationStreamAccumulator.accept",
            match=Assign("should_output", mentions=("stream_interval",)),
            hook="sglang.srt.speculative.semantics.stream_hooks:due",
            args=("should_output", "req", "stream_interval"),
            assign="should_output",
        ),
    ),
)
