"""`python -m posterity` is the command `posterity`."""

import sys

from posterity.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
