"""What a message about a dead rank shows of its log."""

from __future__ import annotations

from pathlib import Path

from rlhpc.runtime.text import tail

FAULT = """Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "service.py", line 1 in _serve

Current thread 0x02 (most recent call first):
  File "role.py", line 7 in fault

Extension modules: numpy, torch (total: 2)
"""


def test_a_fault_is_shown_unless_it_was_an_earlier_processs(tmp_path: Path) -> None:
    log = tmp_path / "rank.err"
    log.write_text("before\n" + FAULT)
    assert "in fault" in tail(str(log)) and "Extension modules" not in tail(str(log)) and "_serve" not in tail(str(log))
    later = [f"line {n}" for n in range(20)]
    log.write_text(FAULT + "\n".join(later) + "\n")
    assert tail(str(log)).split("\n    ")[1:] == later[-12:]
