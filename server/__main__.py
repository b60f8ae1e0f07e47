"""`python -m server`: see cli.py for the command line and app.py for what starts in which order."""

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main())
