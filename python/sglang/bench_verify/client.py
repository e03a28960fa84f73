"""A client for one running server, on the standard library.

Token counts come from the server's usage figures. Stream events are never counted: with speculation one
event carries several tokens, and a bench that counts events reports a third of the speed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.bench_verify.errors import BenchError
from sglang.bench_verify.prompts import Prompt


class ServerError(BenchError):
    """A request that failed, with the address and the server's words."""


@dataclass(frozen=True)
class Answer:
    """One answered request.

    Attributes:
        seconds: wall time of the request, prefill included.
        tokens: completion tokens as the server counts them.
        prompt_tokens: prompt tokens as the server counts them.
        text: the answer.
        output_ids: its tokens where the endpoint gives them.
        info: ``meta_info`` of ``/generate``, or the ``metadata`` of a chat answer.
        finish: why it ended.
    """

    seconds: float
    tokens: int
    prompt_tokens: int
    text: str
    output_ids: tuple[int, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    finish: str = ""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def units(self) -> tuple[Any, ...]:
        """What a loop is looked for in: tokens, or words where there are none."""
        return self.output_ids or tuple(self.text.split())


class Client:
    """Talks to one server."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._timeout_s = timeout_s

    def healthy(self) -> bool:
        """Whether the server answers its health check within a few seconds."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def info(self) -> dict[str, Any]:
        """``/server_info``: arguments and internal states."""
        return self._call("/server_info")

    def statistics(self) -> dict[str, Any]:
        """The scheduler's speculative statistics; empty when the server has none."""
        info = self.info()
        with self._understood("/server_info"):
            states = info.get("internal_states") or [{}]
            found: dict[str, Any] = states[0].get("spec_stats") or {}
            return found

    def generate(self, text: str, tokens: int, ignore_eos: bool = False, temperature: float = 0.0) -> Answer:
        """Continue plain text."""
        sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": ignore_eos}
        begin = time.perf_counter()
        answer = self._call("/generate", {"text": text, "sampling_params": sampling})
        seconds = time.perf_counter() - begin
        with self._understood("/generate"):
            info = answer["meta_info"]
            reason = info.get("finish_reason") or {}
            return Answer(
                seconds=seconds,
                tokens=int(info["completion_tokens"]),
                prompt_tokens=int(info["prompt_tokens"]),
                text=str(answer.get("text", "")),
                output_ids=tuple(answer.get("output_ids") or ()),
                info=info,
                finish=str(reason.get("type", "")),
            )

    def chat(self, prompt: Prompt, tokens: int, temperature: float = 0.0) -> Answer:
        """Answer a conversation, through the model's chat template."""
        body = {
            "model": "default",
            "messages": prompt.conversation(),
            "max_tokens": tokens,
            "temperature": temperature,
        }
        begin = time.perf_counter()
        answer = self._call("/v1/chat/completions", body)
        seconds = time.perf_counter() - begin
        with self._understood("/v1/chat/completions"):
            choice, usage = answer["choices"][0], answer["usage"]
            message = choice["message"]
            return Answer(
                seconds=seconds,
                tokens=int(usage["completion_tokens"]),
                prompt_tokens=int(usage["prompt_tokens"]),
                text=(message.get("reasoning_content") or "") + (message.get("content") or ""),
                info=answer.get("metadata") or {},
                finish=str(choice.get("finish_reason", "")),
            )

    def answer(self, prompt: Prompt, tokens: int, temperature: float = 0.0) -> Answer:
        """A conversation through the chat endpoint, plain text through ``/generate``."""
        if prompt.messages:
            return self.chat(prompt, tokens, temperature)
        return self.generate(prompt.plain(), tokens, temperature=temperature)

    @contextlib.contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """What listens at an address need not be this server: say so instead of naming a key."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ServerError(
                f"{self.url}{path}: not the answer of an SGLang server ({error!r}); is the address right?"
            ) from error

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(
                self.url + path, data=data, headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                found = json.load(response)
            if not isinstance(found, dict):
                raise ServerError(f"{self.url}{path}: not the answer of an SGLang server: {str(found)[:80]}")
            return found
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:500]
            raise ServerError(f"{self.url}{path} answered {error.code}: {text}") from error
        except ServerError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}{path}: {error or type(error).__name__}") from error
