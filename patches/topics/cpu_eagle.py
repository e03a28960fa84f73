from patches.engine import Around, Branch, GuardBranch, InsertAtTop, Topic

ATTENTION = "sglang.srt.layers.attention.cpu_eagle.hooks"
DEFAULTS = "sglang.srt.cpu_engine.defaults"
SLOTS = "sglang.srt.cpu_engine.paged_slots"
PAGED = "sglang/srt/mem_cache/allocator/paged.py"
DRAFT = "sglang/srt/speculative/draft_utils.py"

TOPIC = Topic(
    name="cpu-eagle",
    why=(
        "Upstream's kernels cannot be imported without a driver, and no attention backend serves EAGLE on a CPU "
        "without AMX, so a machine without a GPU can neither run nor test speculative decoding."
    ),
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.17/python/sglang/srt/speculative/draft_utils.py",
    retire_when="upstream serves EAGLE on any CPU with its default package",
    detect="with the topic off, EAGLE-3 is served with --device cpu where there is neither AMX nor a driver",
    overlay=("sglang/srt/cpu_engine/", "sglang/srt/layers/attention/cpu_eagle/", "sgl_kernel_portable/"),
    edits=(
        InsertAtTop(file="sglang/__init__.py", hook="sglang.srt.cpu_engine.bootstrap:prepare"),
        Around(
            file="sglang/srt/layers/attention/attention_registry.py",
            scope="create_torch_native_backend",
            hook=f"{ATTENTION}:create_attention_backend",
        ),
        Around(
            file=DRAFT,
            scope="DraftBackendFactory.create_decode_backend",
            hook=f"{ATTENTION}:create_draft_decode_backend",
        ),
        Around(
            file=DRAFT,
            scope="DraftBackendFactory.create_draft_extend_backend",
            hook=f"{ATTENTION}:create_draft_extend_backend",
        ),
        GuardBranch(
            file="sglang/srt/arg_groups/speculative_hook.py",
            scope="_handle_eagle_family",
            match=Branch(mentions=("speculative_eagle_topk", "page_size", "_PAGE_TREE_SPEC_BACKENDS")),
            hook=f"{DEFAULTS}:refuses_paged_trees",
            args=("server_args",),
        ),
        Around(
            file=PAGED,
            scope="PagedTokenToKVPoolAllocator.alloc_extend",
            hook=f"{SLOTS}:alloc_extend",
        ),
        Around(
            file=PAGED,
            scope="PagedTokenToKVPoolAllocator.alloc_decode",
            hook=f"{SLOTS}:alloc_decode",
        ),
        Around(
            file="sglang/srt/server_args.py",
            scope="ServerArgs._handle_missing_default_values",
            hook=f"{DEFAULTS}:server_defaults",
        ),
        Around(
            file="sglang/srt/distributed/parallel_state.py",
            scope="init_model_parallel_group",
            hook=f"{DEFAULTS}:group_without_nccl",
        ),
        Around(
            file="sglang/srt/entrypoints/engine.py",
            scope="_set_envs_and_config",
            hook=f"{DEFAULTS}:announce",
        ),
    ),
)
