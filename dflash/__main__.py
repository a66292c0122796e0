"""`python -m dflash`: see `dflash.cli`."""

import sys

from dflash.cli import main
from env.errors import speak_anywhere

if __name__ == "__main__":
    speak_anywhere()
    sys.exit(main(sys.argv[1:]))
