"""`python -m server`: cli.py has the command line, start/process.py the order of the start."""

import os
import sys

from server.start import arena, signals

signals.hold()  # before the imports below, which take a while


def start() -> int:
    """The process's exit status. A checkout whose extensions are not built has no `_fast.*` to import."""
    # Before numpy is imported. Its products are small, and the pool makes several at once: idle threads of
    # OpenBLAS would spin on the pool's cores. With them a window of speech took more than twice the CPU on two cores.
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
