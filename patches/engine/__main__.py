"""Entry point of ``python -m patches.engine``."""

import sys

if __name__ == "__main__":
    from patches.engine.cli import main

    sys.exit(main())
