"""What the groups that score tell of a step."""

from __future__ import annotations

from rlhpc.language.runners.auxiliary_groups import served_metrics


def test_ranks_work_side_by_side_and_their_work_adds_up() -> None:
    teacher = [
        {"busy_s": 2.0, "tokens": 300.0, "count/late": 1.0, "count/time/template_s": 0.25},
        {"busy_s": 4.0, "tokens": 500.0, "count/late": 2.0, "count/time/template_s": 0.5},
    ]
    assert served_metrics({"teacher": teacher}) == {
        "time/teacher_s": 4.0,
        "time/teacher_tokens_per_s": 200.0,
        "teacher/late": 3.0,
        "time/teacher_template_s": 0.75,
    }


def test_those_that_rate_count_answers_and_an_idle_group_divides_by_nothing() -> None:
    row = served_metrics({"judge": [{"busy_s": 0.0, "answers": 0.0}]})
    assert row == {"time/judge_s": 0.0, "time/judge_answers_per_s": 0.0}
