"""Health of a server as its users see it: can it still produce a token?

``/health_generate`` answers 200 only after the scheduler has sent something since the question, be it for the probe
or for a request in flight. A scheduler that hangs in a kernel, in a collective or at all makes it 503, while the HTTP
process goes on answering. ``/health`` does the same unless SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION is off, and then
says 200 for ever (sglang#35822), so it is not asked.
"""

from __future__ import annotations

import http.client
import math
import os
import sys
import urllib.error
import urllib.request

#: The server itself gives up after SGLANG_HEALTH_CHECK_TIMEOUT seconds (20).
MARGIN_S = 5.0


#: Unset or empty, as the entrypoint has it.
PORT, TIMEOUT_S = "30000", "20"


def setting(name: str, default: str) -> float:
    """A number above 0 from the environment.

    Raises:
        ValueError: it is none, in a sentence.
    """
    text = os.environ.get(name) or default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={text} is no number above 0; correct it, or unset it for {default}")
    return number


def main() -> int:
    """Status 0 if a token came, 1 otherwise, with the reason on one line."""
    host = os.environ.get("HEALTH_HOST") or "127.0.0.1"
    try:
        port = setting("PORT", PORT)
        if port != int(port) or port > 65535:
            raise ValueError(f"PORT={os.environ['PORT']} is no port; give one from 1 to 65535")
        limit = setting("SGLANG_HEALTH_CHECK_TIMEOUT", TIMEOUT_S) + MARGIN_S
    except ValueError as error:
        print(f"unhealthy: {error}")
        return 1
    url = f"http://{host}:{int(port)}/health_generate"
    try:
        # No proxy of the environment stands between a container and itself.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=limit) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        print(f"unhealthy: {url} answers {error.code}: starting, stopping, or no token within its limit")
        return 1
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"unhealthy: {url}: {' '.join(str(error).split()) or type(error).__name__}")
        return 1
    print("healthy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
