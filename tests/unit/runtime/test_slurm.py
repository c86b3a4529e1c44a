"""The environment of Slurm's commands; `tests/slurm/test_user_environment.py` holds it against a real Slurm."""

from __future__ import annotations

import pytest

from rlhpc.runtime.slurm import ask, query_environment


def test_what_users_set_for_their_own_queries_is_dropped() -> None:
    kept = {
        "SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "c", "SBATCH_ACCOUNT": "a", "SLURM_JOB_ID": "7", "PATH": "/bin",
        "LANG": "de_DE.UTF-8",
    }  # fmt: skip
    dropped = dict.fromkeys(
        ("SQUEUE_FORMAT", "SQUEUE_STATES", "SINFO_SORT", "SACCT_FORMAT", "SCONTROL_ALL", "SCANCEL_STATE", "SLURM_BITSTR_LEN",
         "SLURM_JSON", "LC_TIME", "LC_MESSAGES", "LANGUAGE"), "x",
    )  # fmt: skip
    fixed = {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    assert query_environment({**kept, **dropped, "SLURM_TIME_FORMAT": "%d %b", "LC_ALL": "de_DE"}) == {**kept, **fixed}


def test_every_command_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%u")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%H")
    shown = "echo ${SQUEUE_FORMAT-none} $SLURM_TIME_FORMAT $LC_ALL"
    assert ask("bash", "-c", shown).text == "none standard C\n"
    assert ask("bash", "-c", shown, environment={"SQUEUE_FORMAT": "%i"}).text == "none standard C\n"
