"""The cases, as data, and the program that runs them in a process of its own (``TRITON_INTERPRET`` must be set
before Triton is imported). Prints one JSON line a case; ``test_hooks.py`` reads them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import drive
import rig
import torch

ARCHS = {arch.name: arch for arch in (rig.MLA, rig.GQA, rig.MHA)}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
MODES = ("verify", "draft_extend", "decode", "draft_decode")


@dataclass(frozen=True)
class Case:
    """One comparison of the hooked path with the stock path. ``prefixes`` are committed lengths in tokens."""

    name: str
    mode: str
    arch: str = "gqa"
    prefixes: tuple[int, ...] = (5, 1, 37)
    tokens: int = 3
    step: int = 0
    dtype: str = "fp32"
    scale: float = 1.0
    page_size: int = 1
    mixed: bool = False
    window: int | None = None


def comparisons() -> Iterator[Case]:
    """Eager forward of every mode and architecture, with the lengths where such kernels go wrong."""
    for mode in MODES:
        for arch in ("mla", "gqa"):
            yield Case(f"{mode}-{arch}", mode, arch)
    yield Case("verify-mha", "verify", "mha", (33,))
    yield Case("decode-mha", "decode", "mha", (33,))
    yield Case("verify-mla-lengths", "verify", "mla", (0, 2, 63))
    yield Case("verify-gqa-lengths", "verify", "gqa", (0, 2, 63, 64))
    yield Case("verify-mla-peaked", "verify", "mla", (131,), scale=8.0)
    yield Case("verify-gqa-peaked", "verify", "gqa", (131, 97), scale=8.0)
    yield Case("draft_extend-mla-fp16", "draft_extend", "mla", (65,), dtype="fp16")
    yield Case("draft_extend-gqa-fp16", "draft_extend", "gqa", (65, 3), dtype="fp16")
    yield Case("draft_decode-mla-step1", "draft_decode", "mla", (7, 64), step=1)
    yield Case("draft_decode-gqa-step1", "draft_decode", "gqa", (7, 64, 1), step=1)
    yield Case("verify-gqa-5-tokens", "verify", tokens=5)
    yield Case("verify-mla-1-token", "verify", "mla", (5, 1), tokens=1)
    yield Case("verify-gqa-page-16", "verify", page_size=16)


def controls() -> Iterator[Case]:
    """A few of them for the run with the topics off."""
    for mode in MODES:
        yield Case(f"{mode}-off", mode, "gqa")


def replays() -> Iterator[Case]:
    """Captured at batch 4, replayed with other lengths and fewer live requests; ``prefixes`` unused."""
    for mode in MODES:
        yield Case(f"graph-{mode}-mla", mode, "mla", ())
        yield Case(f"graph-{mode}-gqa", mode, "gqa", (), step=1 if mode == "draft_decode" else 0)

    yield Case("graph-verify-mixed", "verify", "gqa", (), mixed=True)
    yield Case("graph-decode-mixed", "decode", "mla", (), mixed=True)


REPLAY_BATCHES = ((3, 9, 1, 4), (150,), (1, 64, 2))


def compare(case: Case, args: Any) -> dict[str, Any]:
    """Largest difference between the hooked and the stock output, and who served the hooked run."""
    setup = _build(case, args)
    batch = drive.live_batch(setup, list(case.prefixes))
    given = drive.inputs(setup, len(case.prefixes))
    expected = drive.stock(setup, lambda: drive.eager(setup, batch, given)) if setup.bindings else None
    _reset()
    got = drive.eager(setup, batch, given)
    return _verdict(got, expected if expected is not None else got)


def replay(case: Case, args: Any) -> dict[str, Any]:
    """The same over a captured shape; the expected output is the stock path run eagerly on each live batch."""
    setup = _build(case, args)
    _reset()
    graph = drive.Graph(setup, drive.MAX_BATCH, mixed=case.mixed)
    worst = 0.0
    for prefixes in REPLAY_BATCHES:
        batch = drive.live_batch(setup, list(prefixes))
        given = drive.inputs(setup, len(prefixes))
        expected = (
            drive.stock(setup, lambda b=batch, g=given: drive.eager(setup, b, g)) if setup.bindings else None
        )
        got = graph.replay(batch, given)
        if not bool(torch.isfinite(got).all()):
            return _verdict(got, got) | {"error": float("inf")}
        if expected is not None:
            worst = max(worst, float((got - expected).abs().max()))
    return _verdict(got, got) | {"error": worst}


def _build(case: Case, args: Any) -> drive.Setup:
    return drive.build(
        ARCHS[case.arch],
        case.mode,
        args,
        tokens=case.tokens,
        step=case.step,
        dtype=DTYPES[case.dtype],
        scale=case.scale,
        page_size=case.page_size,
        window=case.window,
        **({"sliding_window_size": case.window} if case.window else {}),
    )


def _reset() -> None:
    from sglang.fork import counters, fallbacks

    counters.reset()
    fallbacks.reset()


def _verdict(got: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    from sglang.fork import counters, fallbacks

    return {
        "error": float((got.float() - expected.float()).abs().max()),
        "finite": bool(torch.isfinite(got).all()),
        "magnitude": float(expected.float().abs().mean()),
        "counters": counters.snapshot(),
        "fallbacks": fallbacks.snapshot().get("verify-attention", {}),
    }


def _refused(name: str, mode: str, change: Callable[[drive.Setup, Any], dict[str, Any]], **build: Any) -> Any:
    def run(args: Any) -> dict[str, Any]:
        setup = _build(
            replace(Case(name, mode), **{k: v for k, v in build.items() if k in Case.__annotations__}), args
        )
        batch = drive.live_batch(setup, [5, 1, 37])
        given = drive.inputs(setup, 3)
        extra = change(setup, batch)
        _reset()
        return _verdict(drive.eager(setup, batch, given, **extra), torch.zeros(1)) | {"error": 0.0}

    return name, run


def _layer(**fields: Any) -> Callable[[drive.Setup, Any], dict[str, Any]]:
    def change(setup: drive.Setup, batch: Any) -> dict[str, Any]:
        for name, value in fields.items():
            setattr(setup.layer, name, value)
        return {}

    return change


def _sinks(setup: drive.Setup, batch: Any) -> dict[str, Any]:
    return {"sinks": torch.zeros(setup.arch.q_heads)}


def _tree(setup: drive.Setup, batch: Any) -> dict[str, Any]:
    batch.spec_info.topk = 2
    return {}


def _foreign(setup: drive.Setup, batch: Any) -> dict[str, Any]:
    from sglang.srt.speculative.spec_info import SpecInputType

    batch.spec_info.spec_input_type = SpecInputType.NGRAM_VERIFY
    return {}


def _front(setup: drive.Setup, batch: Any) -> dict[str, Any]:
    batch.spec_info.num_front_tokens = 1
    return {}


def _alone(setup: drive.Setup, batch: Any) -> dict[str, Any]:
    for binding in setup.bindings:
        binding.draft_step = None
    return {}


def _backend(reason: str) -> Callable[[drive.Setup, Any], dict[str, Any]]:
    def change(setup: drive.Setup, batch: Any) -> dict[str, Any]:
        for binding in setup.bindings:
            binding.refusal = reason
        return {}

    return change


def _rows(setup: drive.Setup, batch: Any) -> dict[str, Any]:
    batch.spec_info.draft_token_num = 2
    batch.spec_info.custom_mask = rig.chain_mask([5, 1, 37], 2)
    return {}


REFUSALS = dict(
    [
        _refused("topk 2", "verify", _tree),
        _refused("ngram", "verify", _foreign),
        _refused("sinks", "verify", _sinks),
        _refused("sinks-decode", "decode", _sinks),
        _refused("cross", "verify", _layer(is_cross_attention=True)),
        _refused("window", "decode", _layer(), window=5),
        _refused("temperature", "decode", _layer(xai_temperature_len=16)),
        _refused("rows", "verify", _rows),
        _refused("front", "draft_extend", _front),
        _refused("alone", "draft_decode", _alone),
        _refused("deterministic", "decode", _backend("deterministic inference")),
    ]
)


def sabotage(mode: str, args: Any) -> dict[str, Any]:
    """The comparison with every length one short; the test demands a difference."""
    from sglang.srt.layers.attention.verify import hooks

    honest = hooks.locate

    def short(*positional: Any, **named: Any) -> Any:
        call = honest(*positional, **named)
        return replace(call, context=replace(call.context, seq_lens=call.context.seq_lens - 1))

    hooks.locate = short
    try:
        return compare(Case(f"sabotage-{mode}", mode, prefixes=(5, 2, 37)), args)
    finally:
        hooks.locate = honest


def identity(args: Any) -> dict[str, Any]:
    """Which methods of the backend are wrapped, and whether an instance is bound."""
    from sglang.srt.layers.attention import triton_backend

    methods = {
        f"{owner.__name__}.{name}": member
        for owner in (triton_backend.TritonAttnBackend, triton_backend.TritonMultiStepDraftBackend)
        for name, member in vars(owner).items()
    }
    wrapped = sorted(name for name, member in methods.items() if hasattr(member, "__wrapped__"))
    setup = _build(Case("identity", "verify"), args)
    return {"wrapped": wrapped, "bound": bool(setup.bindings)}


def main() -> None:
    """Run every case of the groups named on the command line (default: all)."""
    groups = sys.argv[1:] or ["comparisons", "replays", "refusals"]
    with rig.server() as args:
        if "comparisons" in groups:
            for case in comparisons():
                _print(case.name, lambda c=case: compare(c, args), asdict(case))
        if "controls" in groups:
            for case in controls():
                _print(case.name, lambda c=case: compare(c, args), asdict(case))
        if "replays" in groups:
            for case in replays():
                _print(case.name, lambda c=case: replay(c, args), asdict(case))
        if "sabotage" in groups:
            for mode in MODES:
                _print(f"sabotage-{mode}", lambda m=mode: sabotage(m, args), {})
        if "identity" in groups:
            _print("identity", lambda: identity(args), {})
        if "refusals" in groups:
            for name, run in REFUSALS.items():
                _print(f"refused-{name}", lambda r=run: r(args), {})


def _print(name: str, run: Callable[[], dict[str, Any]], case: dict[str, Any]) -> None:
    begin = time.perf_counter()
    result = run()
    print(json.dumps({"name": name, "seconds": time.perf_counter() - begin, **case, **result}), flush=True)


if __name__ == "__main__":
    main()
