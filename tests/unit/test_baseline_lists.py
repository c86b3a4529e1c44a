"""Public names and messages are those of an earlier commit: nothing that users rely on changes by accident.

`python -m tests.baseline lists` writes the lists in `tests/data/baseline` anew, after a change that is meant. A message or an
import path that goes away on purpose, while the lists stay, has a line in an allow file beside them:

- `changed_messages.txt`: the old template as `messages.txt` has it.
- `moved_paths.txt`: `old → new`, as `import_paths.txt` has the old one.
"""

from __future__ import annotations

import pytest

from tests.baseline import lists

#: Lists that are the same in both directions.
SAME = [name for name in lists.LISTS if name not in ("messages", "import_paths", "plugins")]


@pytest.mark.parametrize("name", SAME)
def test_names_are_those_of_the_baseline(name: str) -> None:
    recorded, current = lists.read(name), lists.LISTS[name]()
    gone, new = sorted({*recorded} - {*current}), sorted({*current} - {*recorded})
    assert not gone and not new, f"tests/data/baseline/{name}.txt\ngone: {gone}\nnew: {new}"
    assert len(recorded) >= 20


def test_plugins_are_those_of_the_baseline() -> None:
    """Groups, keys and built-in names of all registries."""
    recorded, current = lists.read("plugins"), lists.plugins()
    assert recorded == current
    assert len({line.partition(" ")[0] for line in recorded if " | " in line}) >= 15


def test_documented_import_paths_still_resolve() -> None:
    moved = dict(line.split(" → ") for line in lists.read("moved_paths"))
    recorded = lists.read("import_paths")
    gone = [path for path in recorded if not lists.resolves(moved.get(path, path))]
    assert not gone, (
        f"tests/data/baseline/import_paths.txt: {gone} are no longer there; moved_paths.txt says where they are"
    )
    assert {*moved} <= {*recorded}, "moved_paths.txt has paths that nothing named"
    assert len(recorded) > 30


def test_no_message_disappears_by_accident() -> None:
    current, changed = {*lists.messages()}, {*lists.read("changed_messages")}
    recorded = lists.read("messages")
    gone = [text for text in recorded if text not in current | changed]
    assert not gone, "tests/data/baseline/messages.txt has, and changed_messages.txt has not:\n" + "\n".join(gone)
    assert changed <= {*recorded}, "changed_messages.txt has messages that nothing said"
    assert len(recorded) > 500
