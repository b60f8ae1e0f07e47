"""`python -m server`: see cli.py for the command line and app.py for what starts in which order."""

import sys

from server import signals

signals.hold()  # before the imports below, which take a while

from server.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
