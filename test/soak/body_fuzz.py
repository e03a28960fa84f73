"""Request bodies that no client should send: does speculation turn a refusal into a failure?

    python test/soak/body_fuzz.py --bodies 400

Bodies are drawn from the server's own OpenAPI schema, with values of the right type, of wrong types and at the edges.
They are asked of a plain server and then of an EAGLE-3 server. A status of 500 and above that plain decoding does not
give, or a server that ends, is a finding and is printed with its body. Bodies that end the *plain* server are printed
as well, and left out of the comparison.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from differential.servers import Asked, eagle_server, plain_server

PATHS = ("/generate", "/v1/chat/completions", "/v1/completions")
# Not drawn: what fetches other hosts, what belongs to other modes of the server, and what makes answers long.
LEFT_OUT = frozenset(
    [
        "image_data",
        "video_data",
        "audio_data",
        "image_max_dynamic_patch",
        "video_max_dynamic_patch",
        "lora_path",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "session_params",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "rid",
        "stream",
        "stream_options",
        "http_worker_ipc",
        "priority",
        "batch",
        "best_of",
        "n",
        "use_audio_in_video",
        "mm_hashes",
    ]
)
SAMPLING = {
    "temperature": [0, 0.5, 2, -1, "hot", None, 1e9],
    "top_p": [1, 0.5, 0, -1, 2, "x", None],
    "top_k": [-1, 1, 5, 0, -7, 1 << 40, "x"],
    "min_p": [0, 0.5, 1, 2, -1, None],
    "frequency_penalty": [0, 1.5, -2, 3, None, "x"],
    "presence_penalty": [0, 1.5, 9, None],
    "repetition_penalty": [1, 0.5, 2, 0, -1, None],
    "min_new_tokens": [0, 3, 99, -1, None],
    "stop": [None, "a", ["a", "the"], "", [""], 7, [None]],
    "stop_token_ids": [None, [], [5], [-1], [1 << 40], ["x"], 7],
    "stop_regex": [None, "a+", "(", ["b"], 7],
    "ignore_eos": [True, False, "x"],
    "regex": [None, "(yes|no)", "[", "", 7],
    "json_schema": [None, "{}", '{"type":"object"}', "{", 7],
    "ebnf": [None, 'root ::= "a"', "broken"],
    "logit_bias": [None, {"5": 1.0}, {"99999": 1.0}, {"x": 1}, {"5": "y"}, []],
    "sampling_seed": [None, 0, 7, -1, 1 << 63, "x"],
    "custom_params": [None, {}, {"a": 1}, 7],
    "no_stop_trim": [True, None],
    "skip_special_tokens": [False, None],
    "unknown_parameter": [1],
}
EDGES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    -0.5,
    0.5,
    1e308,
    "",
    "a",
    "\x00",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
]


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Follow references."""
    while "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].lstrip("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def value(schema: dict[str, Any], root: dict[str, Any], chance: random.Random, depth: int = 0) -> Any:
    """A value that fits the schema, or (one in five) one from the edges."""
    if chance.random() < 0.2 or depth > 4:
        return chance.choice(EDGES)
    schema = resolved(schema, root)
    for many in ("anyOf", "oneOf", "allOf"):
        if many in schema:
            return value(chance.choice(schema[many]), root, chance, depth + 1)
    if "enum" in schema:
        return chance.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        fields = schema.get("properties", {})
        chosen = [name for name in fields if name in schema.get("required", ()) or chance.random() < 0.2]
        return {name: value(fields[name], root, chance, depth + 1) for name in chosen}
    if kind == "array":
        return [value(schema.get("items", {}), root, chance, depth + 1) for _ in range(chance.randrange(3))]
    plain = {
        "string": ["", "a", "Once upon a time", "user", "auto", "json_object"],
        "integer": [0, 1, 2, 7, -1],
        "number": [0, 0.5, 1, -1.5],
        "boolean": [True, False],
        "null": [None],
    }
    return chance.choice(plain.get(str(kind), EDGES))


def body(path: str, schema: dict[str, Any], root: dict[str, Any], chance: random.Random) -> Any:
    """A body for ``path``: mostly sound, with a few fields that are not."""
    drawn = {"text": "Once upon a time"}
    if path == "/v1/chat/completions":
        drawn = {
            "model": "m",
            "messages": [{"role": "user", "content": "Name the capital of Nepal."}],
            "max_tokens": 5,
        }
    if path == "/v1/completions":
        drawn = {"model": "m", "prompt": "Once upon a time", "max_tokens": 5}
    fields = [name for name in schema.get("properties", {}) if name not in LEFT_OUT]
    for name in chance.sample(fields, chance.randrange(4)):
        drawn[name] = value(schema["properties"][name], root, chance)
    if path == "/generate":
        if chance.random() < 0.2:
            drawn.pop("text", None)
            drawn["input_ids"] = chance.choice([[], [1, 2], [-1], [1 << 40], ["x"], 7, [[1], [2]]])
        names = chance.sample(sorted(SAMPLING), chance.randrange(5))
        sampling = {"max_new_tokens": chance.choice([5, 5, 5, 0, -1, "x", 999])} | {
            n: chance.choice(SAMPLING[n]) for n in names
        }
        drawn["sampling_params"] = sampling if chance.random() < 0.95 else chance.choice(EDGES)
    return drawn


def drawn_bodies(server: Asked, count: int, seed: int) -> list[tuple[str, Any]]:
    """``count`` pairs of path and body from the server's schema."""
    root = server.get("/openapi.json")
    chance = random.Random(seed)
    out = []
    for _ in range(count):
        path = chance.choice(PATHS)
        content = root["paths"][path]["post"].get("requestBody", {}).get("content", {})
        schema = resolved(content.get("application/json", {}).get("schema", {}), root)
        out.append((path, body(path, schema, root, chance)))
    return out


# Stands for an answer that began with a good status and was cut off while the server went on.
CUT_SHORT = 599


def status(server: Asked, path: str, sent: Any) -> int:
    """HTTP status; 0 if the server has ended, ``CUT_SHORT`` for a stream that broke off."""
    try:
        return server.ask(path, sent, limit=60).status
    except (OSError, ValueError, http.client.HTTPException):
        return CUT_SHORT if alive(server) else 0


def alive(server: Asked) -> bool:
    """Whether the server still generates; a moment is left to one whose end has only begun."""
    time.sleep(1)
    try:
        return server.ask("/health_generate", limit=30).status == 200
    except (OSError, ValueError, http.client.HTTPException):
        return False


def statuses(start: Callable[[], AbstractContextManager[Asked]], sent: list[tuple[str, Any]]) -> list[int]:
    """Statuses of all bodies; a server that ends is started again, and the body that ended it is told."""
    out: list[int] = []
    while len(out) < len(sent):
        with start() as server:
            for path, each in sent[len(out) :]:
                out.append(status(server, path, each))
                if out[-1] == 0:
                    print(f"{len(out)} of {len(sent)}: ended by {path} {json.dumps(each)}", file=sys.stderr)
                    print(server.log_tail(12), file=sys.stderr, flush=True)
                    break
    return out


def compare(draw: Callable[[Asked], list[tuple[str, Any]]]) -> int:
    """Draw bodies with a plain server's schema, ask both servers, print the summary as JSON; the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with plain_server(folder) as server:
            sent = draw(server)
        plain = statuses(lambda: plain_server(folder), sent)
        eagle = statuses(lambda: eagle_server(folder), sent)
    findings = [
        {"path": path, "body": each, "plain": left, "eagle": right}
        for (path, each), left, right in zip(sent, plain, eagle, strict=True)
        if (right == 0 or right >= 500) and not (left == 0 or left >= 500)
    ]
    ended = [
        {"path": path, "body": each} for (path, each), left in zip(sent, plain, strict=True) if left == 0
    ]
    failed = [
        {"path": path, "body": each} for (path, each), left in zip(sent, plain, strict=True) if left >= 500
    ]
    print(
        json.dumps(
            {
                "bodies": len(sent),
                "by_path": dict(Counter(path for path, _ in sent)),
                "plain": dict(Counter(plain)),
                "eagle": dict(Counter(eagle)),
                "statuses_that_differ": sum(left != right for left, right in zip(plain, eagle, strict=True)),
                "ended_the_plain_server": ended,
                "failed_plainly": failed,
                "findings": findings,
            }
        )
    )
    return 1 if findings else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bodies", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return compare(lambda server: drawn_bodies(server, options.bodies, options.seed))


if __name__ == "__main__":
    sys.exit(main())
