"""Entry point of ``python -m sglang.verify_demo``."""

import sys

from sglang.verify_demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
