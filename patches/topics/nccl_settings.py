from patches.engine import AddField, Around, Topic

HOOKS = "sglang.srt.verify_settings.hooks"
SERVER_ARGS = "sglang/srt/server_args.py"

TOPIC = Topic(
    name="nccl-settings",
    why=(
        "Whether an NCCL variable reached the ranks must not be a matter of belief: what the user set is kept or the "
        "start says why not, each rank compares what it finds, and a misspelt name is reported."
    ),
    upstream="https://github.com/sgl-project/sglang/blob/v0.5.17/python/sglang/srt/entrypoints/engine.py",
    retire_when="upstream keeps what the user set, or says what it changed, and ranks report what they see",
    detect="with the topic off, CUDA_DEVICE_MAX_CONNECTIONS=1 of the user is found as 1 in every rank",
    overlay=("sglang/srt/verify_settings/", "sglang/bench_verify/__init__.py", "sglang/bench_verify/gpu.py"),
    stacks_on=("cpu-eagle", "spec-arguments"),
    edits=(
        Around(file="sglang/srt/entrypoints/engine.py", scope="_set_envs_and_config", hook=f"{HOOKS}:launch"),
        Around(
            file=SERVER_ARGS, scope="ServerArgs._handle_deterministic_inference", hook=f"{HOOKS}:resolution"
        ),
        Around(file=SERVER_ARGS, scope="prepare_server_args", hook=f"{HOOKS}:prepare"),
        AddField(
            file=SERVER_ARGS,
            scope="ServerArgs",
            name="nccl_profile",
            annotation=(
                "A[Optional[str], 'NCCL settings filled in where you set none: off (default), auto by topology, or "
                "the name of a profile (docs/settings.md).', NS('exec.comm')]"
            ),
            default="None",
        ),
    ),
)
