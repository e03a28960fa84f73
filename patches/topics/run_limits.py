from patches.engine import Around, Topic

TOPIC = Topic(
    name="run-limits",
    why=(
        "A verify reserves twice its width behind the committed tokens, but a request's row of the page table is only the "
        "width plus four longer than the context: wide runs at the context limit write into the neighbour's row."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/26972",
    retire_when="upstream sizes the row by get_alloc_reserve_per_decode for every page size",
    edits=(
        Around(
            file="sglang/srt/mem_cache/allocation_sizing.py",
            scope="get_req_to_token_extra_context_len",
            hook="sglang.srt.speculative.semantics.limits_hooks:row_headroom",
        ),
    ),
)
