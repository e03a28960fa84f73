from patches.engine import Around, Topic

HOOKS = "sglang.srt.speculative.semantics.limits_hooks"

TOPIC = Topic(
    name="run-limits",
    why=(
        "A verify reserves twice its width behind the committed tokens, but a request's row of the page table is only the "
        "width plus four longer than the context: wide runs at the context limit write into the neighbour's row. Requests "
        "within one width of the limit are refused although plain decoding serves them. A token id outside the "
        "vocabulary is looked up all the same: one such request ends the server, and everybody's requests with it."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/26972",
    retire_when="upstream sizes the row by get_alloc_reserve_per_decode for every page size",
    detect="with the topic off and page size 1, a row holds twice a verify's width beyond the context",
    overlay=(
        "sglang/srt/speculative/semantics/limits_hooks.py",
        "sglang/srt/speculative/semantics/request_fields.py",
    ),
    edits=(
        Around(
            file="sglang/srt/mem_cache/allocation_sizing.py",
            scope="get_req_to_token_extra_context_len",
            hook=f"{HOOKS}:row_headroom",
        ),
        Around(
            file="sglang/srt/managers/utils.py",
            scope="compute_num_reserved_tokens",
            hook=f"{HOOKS}:reserved_tokens",
        ),
        Around(
            file="sglang/srt/managers/tokenizer_manager.py",
            scope="TokenizerManager._validate_one_request",
            hook=f"{HOOKS}:known_tokens",
        ),
    ),
)
