"""Groups of real processes that are busy, or are of a script's own class."""

from __future__ import annotations

import sys

from rlhpc import Channel
from tests import warm


def test_neither_side_of_a_call_waits_for_the_other_to_read(launch):
    """More than a socket's buffer holds, either way, while the other side does something else."""
    group = launch(1, "bulky")
    names = [f"name {i}" for i in range(200_000)]
    busy = group.nap(3.0)
    echoes = [group.echo(names) for _ in range(3)]
    assert not busy.done(), "the call itself waited for the rank"
    channel = Channel.create("after")
    group.produce(channel, 1, 10)
    # The rank comes to this call although nobody has read its three answers yet.
    assert channel.get(timeout=20)
    assert busy.wait() == [0] and all(echo.wait() == [names] for echo in echoes)


def test_classes_of_a_main_script_can_be_launched(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from dataclasses import dataclass\nfrom rlhpc import Cluster, Worker\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "class Mine(Worker):\n    def move(self, p):\n        return Point(p.x + 1)\n"
        "if __name__ == '__main__':\n    g = Mine.create_group().launch(Cluster.local(1, 0))\n"
        "    print(g.move(Point(1)).wait())\n"
    )
    done = warm.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert "Point(x=2)" in done.stdout, done.stderr
