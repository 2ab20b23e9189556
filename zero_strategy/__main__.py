"""`python -m zero_strategy`: the same as the command `zero-strategy`."""

from __future__ import annotations

import sys

from zero_strategy.cli import main

if __name__ == "__main__":
    sys.exit(main())
