from patches.engine import Around, Topic

HOOKS = "sglang.srt.speculative.semantics.grammar_hooks"
XGRAMMAR = "sglang/srt/constrained/xgrammar_backend.py"

TOPIC = Topic(
    name="run-grammar",
    why="On a machine without a GPU the first request with a grammar ends the scheduler: pinned memory, Triton kernel.",
    upstream="none found",
    retire_when="upstream allocates and applies grammar masks on a CPU",
    detect="with the topic off, a request with a JSON schema is served on a CPU",
    overlay=("sglang/srt/speculative/semantics/grammar_hooks.py",),
    edits=(
        Around(file=XGRAMMAR, scope="_allocate_token_bitmask", hook=f"{HOOKS}:allocate"),
        Around(file=XGRAMMAR, scope="XGrammarGrammar.apply_vocab_mask", hook=f"{HOOKS}:apply"),
    ),
)
