from patches.engine import Around, InsertAtTop, Topic

ATTENTION = "sglang.srt.layers.attention.cpu_eagle.hooks"
DEFAULTS = "sglang.srt.cpu_engine.defaults"
DRAFT = "sglang/srt/speculative/draft_utils.py"

TOPIC = Topic(
    name="cpu-eagle",
    why=(
        "Upstream's kernels cannot be imported without a driver, and no attention backend serves EAGLE on a CPU "
        "without AMX, so a machine without a GPU can neither run nor test speculative decoding."
    ),
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.17/python/sglang/srt/speculative/draft_utils.py",
    retire_when="upstream serves EAGLE on any CPU with its default package",
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
        Around(
            file="sglang/srt/server_args.py",
            scope="ServerArgs._handle_missing_default_values",
            hook=f"{DEFAULTS}:server_defaults",
        ),
        Around(
            file="sglang/srt/entrypoints/engine.py",
            scope="_set_envs_and_config",
            hook=f"{DEFAULTS}:announce",
        ),
    ),
)
