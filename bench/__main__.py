"""Entry point of `make bench`: runs the benchmarks of the runtime and the loops in sequence, and writes the page of results.

python -m bench [NAME …]        some of them
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

#: Those that take minutes, in the order of the page; the others (`python -m bench.NAME`) train for longer.
NAMES = ("runtime", "weights", "hosts", "scale", "embodied_loop", "environments", "checkpoint", "cartpole")


def main() -> None:
    """Runs each benchmark in a separate process. Continues after a failure, and reports the failed ones at the end."""
    names = sys.argv[1:] or NAMES
    if unknown_names := [name for name in names if importlib.util.find_spec(f"bench.{name}") is None]:
        print(
            f"bench: there is no bench/{unknown_names[0]}.py; those that take minutes: {', '.join(NAMES)}",
            file=sys.stderr,
        )
        sys.exit(2)
    failed_names = []
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode:
            failed_names.append(name)
    for page in ("page", "measured"):
        importlib.import_module(f"bench.{page}").main()
    if failed_names:
        sys.exit(f"failed: {', '.join(failed_names)}")


if __name__ == "__main__":
    main()
