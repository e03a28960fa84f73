"""Entry point of ``python -m patches.engine``."""

import sys

from patches.engine.cli import main

sys.exit(main())
