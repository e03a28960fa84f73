from patches.engine import Around, Topic

FILE = "sglang/srt/layers/attention/triton_backend.py"
HOOKS = "sglang.srt.layers.attention.verify.hooks"

TOPIC = Topic(
    name="verify-attention",
    why=(
        "Target verify and draft extend go through the prefill kernel, which walks the prefix serially for every "
        "sequence and head; their cost grows with context until speculation loses. A split-KV kernel reads the "
        "prefix once for all draft tokens and heads, and serves decode too."
    ),
    upstream="https://github.com/sgl-project/sglang/pull/39316",
    retire_when="upstream's Triton backend serves verify of absorbed MLA and GQA on CUDA with a split-KV kernel",
    detect="`bench_verify slice` gives the same verify time with the topic on and off at a context of 64k",
    overlay=(
        "sglang/srt/layers/attention/verify/",
        # What its modules read of the settings; the rest of that package comes with nccl-settings.
        "sglang/srt/verify_settings/__init__.py",
        "sglang/srt/verify_settings/catalogue.py",
        "sglang/srt/verify_settings/declare.py",
        "sglang/srt/verify_settings/names.py",
        "sglang/srt/verify_settings/declared/",
    ),
    edits=(
        Around(file=FILE, scope="TritonAttnBackend.__init__", hook=f"{HOOKS}:init_backend"),
        Around(
            file=FILE,
            scope="TritonAttnBackend.init_cuda_graph_state",
            hook=f"{HOOKS}:init_cuda_graph_state",
        ),
        Around(file=FILE, scope="TritonAttnBackend.init_forward_metadata", hook=f"{HOOKS}:init_metadata"),
        Around(
            file=FILE,
            scope="TritonAttnBackend.init_forward_metadata_out_graph",
            hook=f"{HOOKS}:init_metadata_out_graph",
        ),
        Around(file=FILE, scope="TritonAttnBackend.forward_extend", hook=f"{HOOKS}:forward_extend"),
        Around(file=FILE, scope="TritonAttnBackend.forward_decode", hook=f"{HOOKS}:forward_decode"),
        Around(file=FILE, scope="TritonMultiStepDraftBackend.__init__", hook=f"{HOOKS}:init_multi_step"),
    ),
)
