"""`python -m server`: cli.py has the command line, start/process.py the start-up sequence."""

import os
import sys

from server.start import arena, signals

signals.hold()  # before the imports below, which take a while


def start() -> int:
    """Run the command line and return the process's exit status. Without built extensions there is no
    `_fast.*` to import.
    """
    # This must precede the import of numpy. numpy's products are small, and the pool runs several at once: idle threads
    # of OpenBLAS would spin on the pool's cores. With them a window of speech took more than twice the CPU on two
    # cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "MALLOC_ARENA_MAX" not in os.environ:
        arena.one_arena()
    try:
        from server.cli import main

        return main()
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("_fast."):
            raise
        print(
            f"omniloop: the extension {error.name} is not built; run `make build`, which needs a C compiler, "
            "or install a wheel",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(start())
