"""`python -m posterity` is the command `posterity`."""

import sys

from posterity.cli.start import main

if __name__ == "__main__":
    sys.exit(main())
