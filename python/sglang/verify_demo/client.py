"""What the demo asks the server: health, a streamed answer, and an answer with its token ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

Prompt = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One finished request.

    Attributes:
        text: the answer as streamed or returned.
        tokens: token ids (empty for a streamed answer: the OpenAI stream carries none).
        count: tokens generated.
        seconds: from sending to the last byte.
        decode_seconds: from the first piece to the last; 0.0 where it was not streamed.
        meta: the server's figures of this request.
    """

    text: str
    tokens: tuple[int, ...] = ()
    count: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)


def question(prompt: Prompt) -> str:
    """What a reader should see as the question."""
    text: str = prompt["prompt"] if "prompt" in prompt else prompt["messages"][-1]["content"]
    return text


class Client:
    """HTTP client of one server on the loopback interface. Proxies of the environment are not used."""

    def __init__(self, port: int, timeout: float = 300.0) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=self.base, timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def healthy(self) -> bool:
        """Whether the server answers its health check."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stream(self, prompt: Prompt, limit: int, show: Callable[[str], None]) -> Answer:
        """Greedy answer through the OpenAI API, each piece passed to `show` as it arrives."""
        from openai import OpenAI  # takes a second to import

        text, usage = "", None
        with httpx.Client(timeout=self._http.timeout, trust_env=False) as http:
            api = OpenAI(base_url=f"{self.base}/v1", api_key="none", http_client=http, max_retries=0)
            first = last = start = time.perf_counter()
            for piece, usage_now in _pieces(api, prompt, limit):
                usage = usage_now or usage
                if piece:
                    last = time.perf_counter()
                    first = last if not text else first
                    text += piece
                    show(piece)
        return Answer(text, count=usage or 0, seconds=last - start, decode_seconds=last - first)

    def answer(self, prompt: Prompt, limit: int) -> Answer:
        """Greedy answer in one piece, with token ids and the server's figures."""
        start = time.perf_counter()
        if "prompt" in prompt:
            sampling = {"temperature": 0, "max_new_tokens": limit}
            body = self._post("/generate", {"text": prompt["prompt"], "sampling_params": sampling})
            text, tokens, meta = body["text"], body["output_ids"], body["meta_info"]
        else:
            wanted = {"return_token_ids": True, "return_meta_info": True}
            request = {
                "model": "default",
                "messages": prompt["messages"],
                "temperature": 0,
                "max_tokens": limit,
            }
            choice = self._post("/v1/chat/completions", request | wanted)["choices"][0]
            text, tokens, meta = (
                choice["message"]["content"],
                choice["token_ids"],
                choice.get("meta_info") or {},
            )
        return Answer(text, tuple(tokens), len(tokens), time.perf_counter() - start, meta=meta)

    def answers(
        self, prompts: list[Prompt], limit: int, parallel: int, done: Callable[[], None]
    ) -> list[Answer]:
        """Answers of all prompts, `parallel` at a time, in the order of the prompts."""

        def one(prompt: Prompt) -> Answer:
            found = self.answer(prompt, limit)
            done()
            return found

        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(one, prompts))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{path} answered {response.status_code}: {response.text[:500]}")
        found: dict[str, Any] = response.json()
        return found


def _pieces(api: Any, prompt: Prompt, limit: int) -> Iterator[tuple[str, int | None]]:
    """(text piece, completion tokens so far if told) of a streamed request."""
    common: dict[str, Any] = {
        "model": "default",
        "temperature": 0,
        "max_tokens": limit,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if "prompt" in prompt:
        chunks = api.completions.create(prompt=prompt["prompt"], **common)
    else:
        chunks = api.chat.completions.create(messages=prompt["messages"], **common)
    for chunk in chunks:
        piece = ""
        if chunk.choices:
            choice = chunk.choices[0]
            piece = (choice.text if "prompt" in prompt else choice.delta.content) or ""
        yield piece, chunk.usage.completion_tokens if chunk.usage else None
