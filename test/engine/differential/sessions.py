"""Conversations kept by the server: each turn goes on behind the last one's output, wherever in a run that ended."""

from __future__ import annotations

from typing import Any

from .servers import Asked

# What a turn adds, how its answer ends, and how it joins what was said before (upstream's session parameters).
TURNS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("Once upon a time", {"max_new_tokens": 11}, {}),
    (" And then", {"max_new_tokens": 30, "stop": ["the", "a"]}, {}),
    (" One day", {"max_new_tokens": 30, "stop_token_ids": [265, 18, 20]}, {}),
    (" He said", {"max_new_tokens": 9, "temperature": 1.0, "sampling_seed": 5}, {}),
    (" Rose", {"max_new_tokens": 8}, {"replace": True}),
    (" lived in", {"max_new_tokens": 7}, {"offset": 9}),
    (" the sea", {"max_new_tokens": 6}, {"drop_previous_output": True}),
)


def converse(server: Asked) -> list[Any]:
    """Ids, text, end and prompt length of each turn of one session."""
    opened = server.ask("/open_session", {"capacity_of_str_len": 4096})
    assert opened.status == 200, opened
    session = opened.body
    said, last = [], None
    for text, parameters, joins in TURNS:
        where = {"id": session, "rid": last} | joins
        answer = server.ask(
            "/generate",
            {"text": text, "sampling_params": {"temperature": 0} | parameters, "session_params": where},
        )
        assert answer.status == 200, (text, answer)
        meta = answer.body["meta_info"]
        last = meta["id"]
        said.append(
            [answer.body["output_ids"], answer.body["text"], meta["finish_reason"], meta["prompt_tokens"]]
        )
    server.ask("/close_session", {"session_id": session})
    return said
