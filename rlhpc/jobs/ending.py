"""Whether a run is over for those who wait for its next driver."""

from __future__ import annotations

import time

from rlhpc.jobs.claim import read_json_file
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.state import states

#: How often Slurm may be asked, and how often in a row the answer must be the same: between the end of one attempt and the
#: start of the next, a run may look dead for a moment.
_LOOK_S, _TIMES = 10.0, 2
_OVER = ("finished", "failed", "cancelled", "dead")


class Ending:
    """Callable: whether nobody will take the run up again by itself.

    Args:
        paths: The run.
        look_s: Least seconds between two looks at more than its status.
    """

    def __init__(self, paths: RunPaths, look_s: float = _LOOK_S) -> None:
        self._paths, self._look_s = paths, look_s
        self._looked, self._times = -look_s, 0

    def __call__(self) -> bool:
        if (read_json_file(self._paths.driver_state) or {}).get("state") == "finished":
            return True
        if time.monotonic() - self._looked >= self._look_s:
            self._looked = time.monotonic()
            self._times = self._times + 1 if self._is_over() else 0
        return self._times >= _TIMES

    def _is_over(self) -> bool:
        [(facts, found)] = states([self._paths])
        # One that was stopped at a terminal is taken up by a person, perhaps; one that was submitted, by its job.
        return found.state in _OVER or (found.state == "stopped" and facts.record is None)
