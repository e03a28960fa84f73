"""Makes a random draft right, sometimes, so that the accept path is tested: for tests only.

A plugin of upstream's (entry-point group `sglang.srt.plugins`). After the draft of a step, draft tokens are
overwritten with the continuation that plain decoding is known to give, up to a depth that varies from step to step:
0 gives a run of 1 accepted token, the chain's full length gives the longest run. Known continuations lie in a JSON
file that may be written after the server has started.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from plugin_entry import declare

VARIABLE = "FORCED_ACCEPTANCE_FILE"


def environment(folder: Path, known: Path) -> dict[str, str]:
    """Write the plugin's metadata into `folder`; return the environment of a server that shall load it."""
    declare(folder, "forced_acceptance", "install")
    paths = [str(Path(__file__).parent), str(folder), os.environ.get("PYTHONPATH", "")]
    return {VARIABLE: str(known), "PYTHONPATH": os.pathsep.join(paths)}


def write_known(known: Path, texts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
    """Tell the plugin, prompt ids -> the ids that follow."""
    known.write_text(json.dumps([[list(prompt), list(ids)] for prompt, ids in texts.items()]))


@lru_cache(maxsize=2)
def _load(path: str, _changed: float) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): ids for prompt, ids in json.loads(Path(path).read_text())}


def depth_of_step(step: int, deepest: int) -> int:
    """How many drafts are made right in a step: 0, 1, ..., deepest, the same each time the step comes."""
    return random.Random(step).randint(0, deepest)


def force(
    tokens: list[int], child: list[int], sibling: list[int], truth: Sequence[int], depth: int, vocabulary: int
) -> list[int]:
    """Return the tree's tokens with exactly `depth` of them agreeing with `truth`, root excluded.

    At each level, the child with most levels below it (the last of several, so that siblings are walked past) gets
    the true token if the level shall agree; every other child that happens to be right is made wrong.
    """
    tokens = list(tokens)

    def height(node: int) -> int:
        below = child[node]
        heights = [0]
        while below != -1:
            heights.append(1 + height(below))
            below = sibling[below]
        return max(heights)

    node, level = 0, 0
    while child[node] != -1 and level < len(truth):
        children = [child[node]]
        while sibling[children[-1]] != -1:
            children.append(sibling[children[-1]])
        for other in children:
            if tokens[other] == truth[level]:
                tokens[other] = (truth[level] + 1) % vocabulary
        if level >= depth:
            break
        node = max(children, key=lambda other: (height(other), other))
        tokens[node] = truth[level]
        level += 1
    return tokens


def install() -> None:
    """Hook the draft worker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft", _after_draft, HookType.AROUND
    )


def _after_draft(original: Callable[..., Any], worker: Any, batch: Any) -> Any:
    verify = original(worker, batch)
    path = os.environ[VARIABLE]
    if not Path(path).exists() or batch.forward_mode.is_idle():
        return verify
    known = _load(path, Path(path).stat().st_mtime)
    width = verify.draft_token_num
    rows = verify.draft_token.view(-1, width)
    vocabulary = worker.draft_runner.model_config.vocab_size
    for i, request in enumerate(batch.reqs):
        truth = known.get(tuple(request.origin_input_ids))
        if truth is None:
            continue
        done = len(request.output_ids)
        forced = force(
            rows[i].tolist(),
            verify.retrieve_next_token[i].tolist(),
            verify.retrieve_next_sibling[i].tolist(),
            truth[done:],
            depth_of_step(done, verify.max_tree_depth - 1),
            vocabulary,
        )
        rows[i].copy_(rows.new_tensor(forced))
    return verify
