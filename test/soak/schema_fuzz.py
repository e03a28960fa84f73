"""Request bodies that schemathesis draws from the server's OpenAPI schema: plain decoding against EAGLE-3.

    uv pip install --no-deps -r requirements/fuzz.txt      # Python 3.11 or newer
    python test/soak/schema_fuzz.py --bodies 400

Half of the bodies fit the schema, half break it in the ways that schemathesis knows. What ``body_fuzz.py`` beside this
cannot do, it does: text of any script, nested values, several endpoints, broken types in every place. What it cannot
know is added to the schema first: the sampling parameters, which upstream declares as "an object", and that a body
without a prompt tests nothing. A status of 500 and above that plain decoding does not give is a finding.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis import GenerationMode

sys.path.insert(0, str(Path(__file__).resolve().parent))

from body_fuzz import LEFT_OUT, SAMPLING, Asked, compare

# The endpoints that generate, each with the field that holds its prompt.
PROMPT_FIELDS = {
    "/generate": "text",
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/api/generate": "prompt",
    "/api/chat": "messages",
}
TEXT = {"type": "string", "minLength": 1, "maxLength": 80}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {"role": {"const": "user"}, "content": TEXT},
        "required": ["role", "content"],
        "additionalProperties": False,
    },
}
FEW = {"type": "integer", "minimum": 0, "maximum": 7}
# Upstream's structural tags refer to themselves; schemathesis gives them up.
FORMATS = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "enum": [
                        None,
                        {"name": "n", "schema": {"type": "object"}},
                        {"name": "n", "schema": {"type": 7}},
                    ]
                },
            },
            "required": ["type"],
            "additionalProperties": False,
        },
    ]
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict")


def sharpened(root: dict[str, Any]) -> dict[str, Any]:
    """The schema with prompts required, answers kept short, and every sampling parameter named.

    Also: no field that ``body_fuzz`` leaves out, and no invented ones where a body is meant to fit.
    """
    for schema in root["components"]["schemas"].values():
        fields = schema.get("properties")
        if not fields:
            continue
        for name in LEFT_OUT:
            if name not in schema.get("required", ()):
                fields.pop(name, None)
        for name in LENGTHS:
            if name in fields:
                fields[name] = FEW
        if "response_format" in fields:
            fields["response_format"] = FORMATS
        if "sampling_params" in fields:
            fields["sampling_params"] = sampling_schema()
        schema["additionalProperties"] = False
    for path, field in PROMPT_FIELDS.items():
        body = body_schema(root, path)
        if body is not None:
            body.setdefault("properties", {})[field] = MESSAGES if field == "messages" else TEXT
            body["required"] = sorted({*body.get("required", ()), field})
            root["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] = inlined(
                body, root
            )
    return root


def inlined(schema: Any, root: dict[str, Any], depth: int = 2) -> Any:
    """The schema without references; those nested deeper than ``depth`` become "anything".

    Some of upstream's schemas refer to themselves, and breaking those takes schemathesis for ever.
    """
    if isinstance(schema, list):
        return [inlined(each, root, depth) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        if not depth:
            return {}
        return inlined(root["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]], root, depth - 1)
    return {name: inlined(value, root, depth) for name, value in schema.items() if name != "discriminator"}


def sampling_schema() -> dict[str, Any]:
    """Sampling parameters with the values that ``body_fuzz`` lists: right ones, wrong ones, edges."""
    named = {name: {"enum": values} for name, values in SAMPLING.items()}
    return {
        "type": "object",
        "properties": named | {"max_new_tokens": FEW},
        "required": ["max_new_tokens"],
        "additionalProperties": False,
    }


def body_schema(root: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The schema of a POST body; None where the server has no such path or says nothing about its body."""
    content = root["paths"].get(path, {}).get("post", {}).get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    while schema is not None and "$ref" in schema:
        schema = root["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    found: dict[str, Any] | None = schema
    return found


def drawn_bodies(root: dict[str, Any], count: int, seed: int) -> list[tuple[str, Any]]:
    """``count`` pairs of path and body, the same ones at every call with the same schema and seed."""
    schema = schemathesis.openapi.from_dict(sharpened(root))
    paths = [path for path in PROMPT_FIELDS if body_schema(root, path) is not None]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    out: list[tuple[str, Any]] = []
    for path in paths:
        for mode in modes:
            # /generate has most of the parameters and takes a third of the bodies.
            share = count // 3 if path == "/generate" else (count - count // 3) // max(1, len(paths) - 1)
            out += [(path, body) for body in examples(schema[path]["POST"], mode, share // 2, seed)]
    return out


def examples(operation: Any, mode: GenerationMode, count: int, seed: int) -> list[Any]:
    """``count`` JSON bodies of one operation, spread over what was drawn: the first ones are the simplest."""
    kept: list[Any] = []

    @seeded(seed)
    @settings(
        max_examples=2 * count + 10,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def gather(case: Any) -> None:
        if not isinstance(case.body, bytes) and case.body not in kept:
            kept.append(case.body)

    gather()
    step = max(1, len(kept) // count)
    return kept[::-1][::step][:count]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bodies", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    def draw(server: Asked) -> list[tuple[str, Any]]:
        return drawn_bodies(server.get("/openapi.json"), options.bodies, options.seed)

    return compare(draw)


if __name__ == "__main__":
    sys.exit(main())
