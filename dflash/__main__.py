"""`python -m dflash`: see `dflash.cli`."""

import sys

from dflash.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
