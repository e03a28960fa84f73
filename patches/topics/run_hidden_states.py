from patches.engine import Around, Topic

HOOKS = "sglang.srt.speculative.semantics.hidden_hooks"

TOPIC = Topic(
    name="run-hidden-states",
    why=(
        "With an EAGLE-3 draft, return_hidden_states hands out the packed states of the auxiliary layers instead of the "
        "last layer's: another width and another meaning than without speculation."
    ),
    upstream="https://github.com/sgl-project/sglang/issues/26163 (their number; that one is answered)",
    retire_when="upstream returns the last layer's hidden states under EAGLE-3",
    detect="with the topic off, return_hidden_states under EAGLE-3 gives vectors of the target's hidden size",
    overlay=("sglang/srt/speculative/semantics/hidden_hooks.py",),
    stacks_on=("verify-fence", "run-nonfinite"),
    edits=(
        Around(
            file="sglang/srt/layers/logits_processor.py",
            scope="LogitsProcessor._get_hidden_states_to_store",
            hook=f"{HOOKS}:keep_final",
        ),
        Around(
            file="sglang/srt/managers/utils.py",
            scope="GenerationBatchResult.copy_to_cpu",
            hook=f"{HOOKS}:to_host",
        ),
        Around(
            file="sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
            scope="DecodeCudaGraphRunner.execute",
            hook=f"{HOOKS}:replayed",
        ),
        Around(
            file="sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py",
            scope="PrefillCudaGraphRunner._trim_logits_output",
            hook=f"{HOOKS}:trimmed",
        ),
        Around(
            file="sglang/srt/speculative/eagle_worker_common.py",
            scope="_compact_accept_to_front",
            hook=f"{HOOKS}:moved",
        ),
    ),
)
