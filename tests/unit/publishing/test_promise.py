"""Reasons for which a repetition of a run need not be the same bit for bit."""

from __future__ import annotations

from rlhpc.publishing.promise import broken_promises


def test_a_resume_with_another_configuration_breaks_the_promise() -> None:
    """The bundle repeats the run with its last configuration; a resume with the same one changes nothing."""
    starts = [{}, {"resumed": {"step": 2, "changes": []}}]
    provenance = {"packages": {"torch": "2"}, "segments": starts}
    assert broken_promises({}, provenance, "finished") == []
    starts.append({"resumed": {"step": 4, "changes": ["actor.optim.lr: 0.1 → 0.2"]}})
    (reason,) = broken_promises({}, provenance, "finished")
    assert "resumed at step 4" in reason and "actor.optim.lr: 0.1 → 0.2" in reason
