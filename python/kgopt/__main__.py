"""Entry point of ``python -m kgopt``."""

import sys

from kgopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
