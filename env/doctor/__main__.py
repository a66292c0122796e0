"""`python -m env.doctor`: the doctor alone, where the rest of the command line cannot be loaded."""

from __future__ import annotations

import sys

from env.doctor import main

sys.exit(main(sys.argv[1:]))
