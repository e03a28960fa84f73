from patches.engine import Around, NameExists, Topic

FILE = "sglang/srt/entrypoints/openai/serving_chat.py"

TOPIC = Topic(
    name="run-chat-logprobs",
    why=(
        "A streamed chat answer gives every token of a piece the top log probabilities of the piece's first token; under "
        "speculation a piece is a run of several."
    ),
    upstream="none found",
    retire_when="upstream's chat streams index the top log probabilities by token",
    detect="with the topic off, tokens of one streamed piece have top_logprobs of their own",
    not_needed=NameExists(FILE, "OpenAIServingChat._build_token_logprobs_from_raw"),
    overlay=("sglang/srt/speculative/semantics/chat_logprob_hooks.py",),
    edits=(
        Around(
            file=FILE,
            scope="OpenAIServingChat._process_logprobs_tokens",
            hook="sglang.srt.speculative.semantics.chat_logprob_hooks:each_tokens_own",
        ),
    ),
)
