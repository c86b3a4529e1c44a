"""Programs that look for what is expected of them in all that they can reach."""

from __future__ import annotations

import pytest

from tests.attack.tries import Try, all_tries, outcome

FORMS = [attempt for attempt in all_tries() if attempt.label == "what a program is to compute"]


@pytest.mark.parametrize("attempt", FORMS, ids=[attempt.name for attempt in FORMS])
def test_what_is_expected_is_not_found(attempt: Try) -> None:
    result, how = outcome(attempt)
    assert result in ("held", "documented"), how
