"""Grammar of `cluster.component_placement`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.runtime.errors import PlacementError
from rlhpc.runtime.placement import parse_placement


class TestGrammar:
    @pytest.mark.parametrize(
        ("text", "processes"),
        [
            ("0", [[0]]),
            ("0-3", [[0], [1], [2], [3]]),
            ("0,2", [[0], [2]]),
            ("0-1,4-5", [[0], [1], [4], [5]]),
            ("all", [[n] for n in range(12)]),
            ("all:0-5", [[n, n + 1] for n in range(0, 12, 2)]),
            ("0-1:0-3", [[0], [0], [1], [1]]),
            ("0-3:0-1", [[0, 1], [2, 3]]),
            ("0-3:0", [[0, 1, 2, 3]]),
            ("0:0-2", [[0], [0], [0]]),
            ("0-1:0-3,3-5:4-6", [[0], [0], [1], [1], [3], [4], [5]]),
            # parts without process ranks count on from those before, as in RLinf's documentation
            ("0-1:0-3,3-5,7-10:7-14", [[n] for n in (0, 0, 1, 1, 3, 4, 5, 7, 7, 8, 8, 9, 9, 10, 10)]),
            ("0-1:0-1,2-3", [[0], [1], [2], [3]]),
            ("3,5:1-2", [[3], [5], [5]]),
            # and are a comma list when the processes after the ':' begin with theirs
            ("0,2,4-5:0-1", [[0, 2], [4, 5]]),
            ("0:0-1,2,4:2-5", [[0], [0], [2], [2], [4], [4]]),
            (" 0 - 1 : 0 - 3 , 3 ", [[0], [0], [1], [1], [3]]),
        ],
    )
    def test_what_it_means(self, text: str, processes: list[list[int]]) -> None:
        assert parse_placement("actor", text, 12) == processes

    @pytest.mark.parametrize(
        ("text", "fault", "rule"),
        [
            ("", "''", "ranks are missing"),
            ("0,,1", "'' in '0,,1'", "ranks are missing"),
            ("0-3,", "''", "ranks are missing"),
            (":0", "':0'", "ranks are missing"),
            ("0:", "'0:'", "ranks are missing"),
            ("0:0:0", "'0:0:0'", "more than one ':'"),
            ("first", "'first'", "not a rank (3), a range (0-3) or 'all'"),
            ("-1", "'-1'", "not a rank"),
            ("1.5", "'1.5'", "not a rank"),
            ("0..3", "'0..3'", "not a rank"),
            ("0-1-2", "'0-1-2'", "not a rank"),
            ("٣", "'٣'", "not a rank"),
            ("9" * 30, "999", "not a rank"),
            ("3-1", "'3-1'", "a range runs upwards"),
            ("0:3-1", "'3-1' in '0:3-1'", "a range runs upwards"),
            ("0:0-99999999", "'0-99999999'", "more than a million processes"),
            ("0:all", "'all' in '0:all'", "'all' stands for resources only"),
            ("4", "'4'", "resource 4 does not exist (the cluster has 4 accelerators (0 to 3))"),
            ("0-4", "'0-4'", "resource 4 does not exist"),
            ("0,0", "'0' in '0,0'", "accelerator 0 follows 0; resource ranks are unique and ascending"),
            ("0-2,2-3", "'2-3' in '0-2,2-3'", "unique and ascending"),
            ("2,1", "'1' in '2,1'", "unique and ascending"),
            ("all,3", "'3' in 'all,3'", "unique and ascending"),
            ("0:0,0:1", "'0:1' in '0:0,0:1'", "unique and ascending"),
            ("0:1", "'0:1'", "process ranks start at 1 instead of 0"),
            ("0:0,1:2", "'1:2' in '0:0,1:2'", "process ranks start at 2 instead of 1"),
            ("0:0-1,1:1", "'1:1' in '0:0-1,1:1'", "process ranks start at 1 instead of 2"),
            ("0-1:0-2", "'0-1:0-2'", "2 accelerators and 3 processes: one count must divide the other"),
            ("0-2:0-1", "'0-2:0-1'", "3 accelerators and 2 processes: one count must divide the other"),
        ],
    )  # fmt: skip
    def test_violations(self, text: str, fault: str, rule: str) -> None:
        with pytest.raises(PlacementError) as error:
            parse_placement("rollout", text, 4, "accelerator")
        message = str(error.value)
        assert message.startswith("cluster.component_placement.rollout: ")
        assert fault in message and rule in message

    def test_nothing_to_place_on(self) -> None:
        with pytest.raises(PlacementError, match="there is no accelerator"):
            parse_placement("actor", "all", 0, "accelerator")

    @given(st.data())
    def test_whatever_is_written_from_the_grammar_is_read_back(self, data: st.DataObject) -> None:
        expected: list[list[int]] = []
        parts: list[str] = []
        resource = 0
        for _ in range(data.draw(st.integers(1, 5))):
            first = resource + data.draw(st.integers(0, 3))
            count, factor = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
            form = data.draw(st.sampled_from(["bare", "shared", "several"]))
            size = count * factor if form == "several" else count
            ranks = list(range(first, first + size))
            resource = first + size
            if form == "bare":
                new = [[r] for r in ranks]
            elif form == "shared":
                new = [[r] for r in ranks for _ in range(factor)]
            else:
                new = [ranks[i * factor : (i + 1) * factor] for i in range(count)]
            names = f":{len(expected)}-{len(expected) + len(new) - 1}" if form != "bare" else ""
            parts.append(f"{ranks[0]}-{ranks[-1]}{names}" if size > 1 else f"{first}{names}")
            expected += new
        assert parse_placement("actor", ",".join(parts), resource) == expected

    @given(st.text(alphabet="0123456789-:, al", max_size=14), st.integers(0, 12))
    def test_any_text_is_placed_by_the_rules_or_refused(self, text: str, resources: int) -> None:
        try:
            processes = parse_placement("actor", text, resources)
        except PlacementError as error:
            assert "cluster.component_placement.actor" in str(error)
            return
        used = [r for ranks in processes for r in ranks]
        assert processes and all(processes) and used == sorted(used) and set(used) <= set(range(resources))
        assert all(a == b or not set(a) & set(b) for a in processes for b in processes)
