"""``python -m labkit`` is the command ``labkit``."""

import sys

from labkit.cli.main import main

sys.exit(main())
