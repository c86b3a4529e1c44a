"""Python programs started warm: real processes that need not import torch again.

`Popen` and `run` are subprocess's, for tests. Where the command is this Python with a module, a script or `-c`, its process is
forked from an interpreter that has imported the heavy packages and done nothing else, in the place of executing a new one.
It is the caller's own child, with the argv, environment, working directory, descriptors, limits, session and group that were
asked for, and it ends as an interpreter does. The Pythons that it starts itself are forked, too. That spares a run of two
seconds another six.

Not for tests whose subject is how an interpreter starts (what is imported, PYTHONPATH, other Pythons, missing packages): those
use subprocess. What a fork could not do alike, `Popen` leaves to subprocess by itself.
"""

from __future__ import annotations

from tests.warm.starting import DEVNULL, PIPE, STDOUT, CompletedProcess, Popen, TimeoutExpired, run

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "Popen", "TimeoutExpired", "run"]
