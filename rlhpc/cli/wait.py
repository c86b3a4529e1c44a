"""`python -m rlhpc.cli.wait`: replaces a waiting shell whose watcher has ended (`rlhpc.jobs.wait_client`)."""

from __future__ import annotations

import sys

from rlhpc.cli.train import print_outcome
from rlhpc.jobs.wait_client import Wait, hand_over
from rlhpc.jobs.waiter import WaitInterrupted, interruption_text, print_message
from rlhpc.runtime.exit_codes import report_errors
from rlhpc.runtime.standard_streams import standard_streams


def _wait(wait_request: Wait, *, is_only_wait: bool) -> int:
    waiter = wait_request.waiter(lambda line: print_message(sys.stderr, line))
    try:
        if not is_only_wait:
            hand_over(wait_request)
        wait_result = waiter.wait()
    except KeyboardInterrupt:
        raise WaitInterrupted(interruption_text(waiter.files, waiter.record)) from None
    print_outcome(waiter.answer(wait_result), as_json=wait_request.answers)
    return 0


def main() -> int:
    standard_streams()
    wait_request, is_alone = Wait.from_environment(), "--alone" in sys.argv[1:]
    return report_errors(lambda: _wait(wait_request, is_only_wait=is_alone))


if __name__ == "__main__":
    sys.exit(main())
