from patches.engine import Around, Call, ReplaceArgument, Topic

FILE = "sglang/srt/layers/attention/triton_backend.py"
HOOKS = "sglang.srt.layers.attention.verify.metadata"

TOPIC = Topic(
    name="verify-metadata",
    why=(
        "Before every replay upstream builds index lists, split counts and offsets that only its own kernels read, "
        "and fills a tree mask of max_batch x draft tokens x context bytes although a chain is causal."
    ),
    upstream="none: follows from verify-attention",
    retire_when="verify-attention is retired, or upstream prepares nothing for a graph that reads the request table",
    detect="with the topic off, a trace of a replayed verify shows no index, split or mask kernel before it",
    overlay=("sglang/srt/layers/attention/verify/metadata.py",),
    stacks_on=("verify-attention",),
    edits=(
        ReplaceArgument(
            file=FILE,
            scope="TritonAttnBackend.init_cuda_graph_state",
            match=Call("maybe_create_verify_mask"),
            argument="is_read",
            hook=f"{HOOKS}:mask_is_read",
            args=("self",),
        ),
        Around(
            file=FILE,
            scope="TritonAttnBackend._update_target_verify_buffers",
            hook=f"{HOOKS}:update_verify_buffers",
        ),
        Around(
            file=FILE,
            scope="TritonAttnBackend._build_cuda_graph_forward_metadata",
            hook=f"{HOOKS}:build_graph_metadata",
        ),
        Around(file=FILE, scope="TritonAttnBackend.init_forward_metadata", hook=f"{HOOKS}:init_metadata"),
        Around(
            file=FILE,
            scope="TritonAttnBackend.init_forward_metadata_out_graph",
            hook=f"{HOOKS}:init_metadata_out_graph",
        ),
        Around(
            file=FILE,
            scope="TritonMultiStepDraftBackend.init_forward_metadata_out_graph",
            hook=f"{HOOKS}:init_multi_step_out_graph",
        ),
    ),
)
