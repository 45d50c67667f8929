"""``python -m rollpack``."""

import sys

from rollpack.cli import main

sys.exit(main())
