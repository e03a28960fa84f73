"""Requests that hold slots for plain steps ahead are retracted and come back: texts stay, and no slot is lost."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from differential.servers import Asked, plain_server
from test_switch import switching

pytestmark = pytest.mark.server

# So few that slots are reserved ahead: they are a sixteenth of the pool.
PROMPTS = [f"The story of number {index}. " * (1 + index % 3) for index in range(4)]
TOKENS = 150


def texts(server: Asked) -> list[str]:
    """What the server says to all prompts at once."""

    def one(prompt: str) -> str:
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        }
        answer = server.ask("/generate", body)
        assert answer.status == 200, answer.body
        text: str = answer.body["text"]
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


@pytest.mark.parametrize("page", (1, 16))
def test_retracted_requests_say_the_same(page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").mkdir()
    with plain_server(tmp_path / "plain") as server:
        expected = texts(server)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "19")
    # The scheduler counts its slots after every step, and dies of one that nobody holds.
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    monkeypatch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
    with switching(tmp_path, 40, f"--page-size={page}") as server:
        assert texts(server) == expected
        assert texts(server) == expected
        counters = server.get("/server_info")["internal_states"][0]["spec_stats"]["counters"]
        assert counters['spec_auto_steps{mode="plain"}'] > 30
        assert "#retracted_reqs: 1" in server.log.read_text(errors="replace")
        server.ask("/flush_cache", {})
        deadline = time.monotonic() + 120
        while (load := server.load())["num_used_tokens"] and time.monotonic() < deadline:
            time.sleep(0.1)
    assert load["num_used_tokens"] == 0 and load["num_running_reqs"] == 0
