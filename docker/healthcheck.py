"""Health of a server as its users see it: can it still produce a token?

``/health_generate`` answers 200 only after the scheduler has sent something since the question, be it for the probe
or for a request in flight. A scheduler that hangs in a kernel, in a collective or at all makes it 503, while the HTTP
process goes on answering. ``/health`` does the same unless SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION is off, and then
says 200 for ever (sglang#35822), so it is not asked.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

#: The server itself gives up after SGLANG_HEALTH_CHECK_TIMEOUT seconds (20).
MARGIN_S = 5.0


def main() -> int:
    """Status 0 if a token came, 1 otherwise, with the reason on one line."""
    host = os.environ.get("HEALTH_HOST", "127.0.0.1")
    port = os.environ.get("PORT", "30000")
    limit = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20")) + MARGIN_S
    url = f"http://{host}:{port}/health_generate"
    try:
        # No proxy of the environment stands between a container and itself.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=limit) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        print(f"unhealthy: {url} answers {error.code}: starting, stopping, or no token within its limit")
        return 1
    except OSError as error:
        print(f"unhealthy: {url}: {error}")
        return 1
    print("healthy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
