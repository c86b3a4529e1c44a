"""The pool: many samples at once, and judges that hang, raise and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from rlhpc.language.config.rewards import RewardConfig, RewardTermConfig
from rlhpc.language.rewards import RewardPool, Sample, Term, make_reward, register_reward
from rlhpc.language.rewards.registry import REWARDS
from rlhpc.runtime.errors import ConfigError, RlhpcError
from tests.serving import temporary_scratch

ROOT = Path(__file__).resolve().parents[4]


def section(*terms, **given) -> RewardConfig:
    named = [RewardTermConfig(**({"name": term} if isinstance(term, str) else term)) for term in terms]
    return RewardConfig(**{"terms": named, "timeout_s": 1.0, "failed": -0.5, "processes": 2, **given})


def moody(sample: Sample) -> float:
    """Does what the response says."""
    match sample.response.split():
        case ["value", number]:
            return float(number)
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["raise"]:
            raise ValueError("in a bad mood")
        case ["exit"]:
            os._exit(0)
        case ["sys.exit"]:
            sys.exit(0)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["daemon", path, seconds]:
            line = f"setsid sleep 1000 & echo $! > {path}; wait 0"
            subprocess.Popen(["sh", "-c", line], start_new_session=True)
            time.sleep(float(seconds))
        case ["pid"]:
            return float(os.getpid())
    return 1.0


class Scaled:
    """A class is built with arguments."""

    def __init__(self, by: float, base: float = 0.0) -> None:
        if by < 0:
            raise ValueError("by must not be negative")
        self.by, self.base = by, base

    def __call__(self, sample: Sample) -> float:
        return self.base + self.by * len(sample.response)


def plus(sample: Sample, more: float = 1.0) -> float:
    return len(sample.response) + more


def says(*responses: str) -> list[Sample]:
    return [Sample("q", response, "a") for response in responses]


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def moody_pool() -> RewardPool:
    return RewardPool([Term("moody", moody)], timeout_s=1.0, failed=-0.5, processes=2)


@pytest.fixture(scope="module")
def the_pool():
    with moody_pool() as pool:
        yield pool


@pytest.fixture
def pool(the_pool):
    """The same for all: it must stand whatever the tests before did to it."""
    the_pool.metrics()
    return the_pool


def test_a_weighted_sum():
    terms = [
        Term("scaled", Scaled, 0.5, {"by": 2.0}),
        Term("plus", plus, 10.0, {"more": 3}),
        Term("n", lambda s: s.tokens),
    ]
    with RewardPool(terms) as pool:
        (scored,) = pool.score([Sample("q", "abc", tokens=7)])
    assert scored.terms == {"scaled": 6, "plus": 6, "n": 7} and scored.total == 3 + 60 + 7 and not scored.failed


def test_from_the_configuration():
    with make_reward(section("exact", {"name": "length", "weight": 2.0, "kwargs": {"limit": 10}})) as pool:
        assert pool._server is None  # both are cheap: no process
        assert [s.total for s in pool.score([Sample("q", " a\n", "a", tokens=5), Sample("q", "b", "a")])] == [0.0, 0.0]
    form = {"name": "format", "kwargs": {"pattern": "a+"}}
    with make_reward(section("exact", form, {**form, "kwargs": {"pattern": "b+"}})) as pool:
        (scored,) = pool.score(says("aa"))
        assert scored.terms == {"exact": 0.0, "format": 1.0, "format#2": 0.0} and scored.total == 1
    with make_reward(section({"name": "os.path:getsize", "weight": 1.0})) as pool:
        assert pool.score(says("x"))[0].reason.startswith("os.path:getsize: TypeError")


def test_what_is_wrong_with_a_configuration_is_said():
    before = set(psutil.Process().children())
    wrong = [
        (section(), "reward.terms is empty"),
        (section("exakt"), "'exakt', which is unknown; did you mean 'exact'"),
        (section("nowhere:f"), "cannot be imported: No module named 'nowhere'"),
        (section("os:nothing"), "cannot be imported"),
        (section("os:sep"), "is a str, no class and no function"),
        (
            section({"name": "length", "kwargs": {"most": 1}}),
            r"reward\.terms\[length\]\.kwargs\.most is 1; .*allowed: limit, start",
        ),
        (section({"name": "length", "kwargs": {"limit": 0}}), "needed: 0 <= start < limit"),
        (section({"name": "format", "kwargs": {"pattern": "("}}), "no regular expression"),
        (section("exact", timeout_s=0), "reward.timeout_s is 0"),
        (section("exact", processes=0), "reward.processes is 0"),
    ]
    for cfg, message in wrong:
        with pytest.raises(ConfigError, match=message):
            make_reward(cfg)
    with pytest.raises(ConfigError, match="by must not be negative"):
        RewardPool([Term("scaled", Scaled, 1.0, {"by": -1})])
    with pytest.raises(RlhpcError, match="no_such_file"):
        RewardPool([Term("reads", Unbuildable)])
    assert set(psutil.Process().children()) <= before


class Unbuildable:
    def __init__(self) -> None:
        Path("no_such_file").read_text()

    def __call__(self, sample: Sample) -> float:
        return 0.0


def test_registered_by_name():
    @register_reward("Half")
    def half(sample: Sample) -> float:
        return 0.5

    assert REWARDS.find("half") is half
    with make_reward(section("half")) as pool:  # a function without a module of its own goes by value
        assert pool.score(says("x"))[0].total == 0.5
    with pytest.raises(ConfigError, match="registered twice"):
        register_reward("HALF")(half)
    with pytest.raises(ConfigError, match="registered twice"):
        register_reward("math")(half)


def test_an_installed_package_offers_one(tmp_path, monkeypatch):
    (tmp_path / "offered_rewards.py").write_text(
        "def vowels(sample):\n    return sum(c in 'aeiou' for c in sample.response)\n"
    )
    meta = tmp_path / "offered-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[rlhpc.text_rewards]\nvowels = offered_rewards:vowels\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with make_reward(section("vowels")) as pool:
        assert pool.score(says("banana"))[0].total == 3


@pytest.mark.parametrize("mood", ["raise", "exit", "sys.exit", "kill", "value nan", "value inf"])
def test_a_judge_that_fails_costs_its_sample(pool, mood):
    scored = pool.score(says("value 1", mood, "value 2", "value 3"))
    assert [s.total for s in scored] == [1, -0.5, 2, 3] and [s.failed for s in scored] == [
        False,
        True,
        False,
        False,
    ]
    assert scored[1].reason and scored[1].terms == {"moody": -0.5}
    counts = pool.metrics()
    assert counts["scored"] == 4 and counts["failed"] == counts["died"] + counts["raised"] == 1
    assert pool.metrics()["scored"] == 0


@pytest.mark.parametrize("mood", ["sleep 60", "stop"])
def test_a_judge_that_hangs_is_replaced(pool, mood):
    started = time.monotonic()
    scored = pool.score(says(mood, *(f"value {i}" for i in range(20)), mood))
    assert [s.total for s in scored] == [-0.5, *range(20), -0.5] and "timeout_s (1 s)" in scored[0].reason
    assert time.monotonic() - started < 20
    assert pool.metrics()["timeouts"] == 2
    assert pool.score(says("value 5"))[0].total == 5


def test_what_a_judge_started_ends_with_it(tmp_path):
    """Also what has left its session and its process group."""
    pool = moody_pool()
    (scored,) = pool.score(says(f"daemon {tmp_path / 'pid'} 60"))
    assert scored.failed
    assert gone(int((tmp_path / "pid").read_text()))
    pool.score(says(f"daemon {tmp_path / 'later'} 0.3"))
    left = int((tmp_path / "later").read_text())
    pool.close()
    assert gone(left)


def test_nothing_waits_for_the_slowest(pool):
    pool.submit("slow", says("sleep 0.7")[0])
    for i in range(10):
        pool.submit(i, says(f"value {i}")[0])
    seen = []
    while pool.unfinished():
        seen += pool.poll(0.05)
    assert [key for key, _ in seen][-1] == "slow" and len(seen) == 11
    assert {key: scored.total for key, scored in seen if key != "slow"} == {i: i for i in range(10)}
    assert pool.poll() == []


def test_score_leaves_what_was_submitted(pool):
    pool.submit("mine", says("value 7")[0])
    assert pool.score(says("value 1"))[0].total == 1
    seen = []
    while pool.unfinished():
        seen += pool.poll(0.05)
    assert [(key, scored.total) for key, scored in seen] == [("mine", 7)]


def test_draining_forgets(pool):
    for i in range(4):
        pool.submit(i, says("sleep 0.3")[0])
    pool.drain()
    assert pool.unfinished() == 0 and pool.poll(0.1) == []
    assert pool.score(says("value 3"))[0].total == 3
    assert pool.poll(0.5) == []


def test_judges_are_reused(pool):
    pids = {scored.total for scored in pool.score(says(*["pid"] * 50))}
    assert 1 <= len(pids) <= 2


def test_the_server_itself_is_killed(pool):
    assert pool.score(says("value 1"))[0].total == 1
    pool.submit("under way", says("sleep 60")[0])
    folder = Path(pool._folder)
    os.kill(pool._server.pid, signal.SIGKILL)
    seen = []
    while pool.unfinished():
        seen += pool.poll(0.1)
    assert seen[0][1].failed and not folder.exists()
    assert pool.score(says("value 2"))[0].total == 2


def test_closing_leaves_nothing(tmp_path):
    pool = RewardPool([Term("moody", moody)], timeout_s=60, processes=2)
    pool.submit(0, says("sleep 60")[0])
    server = pool._server.pid
    below = [child.pid for child in psutil.Process(server).children(recursive=True)]
    assert below
    pool.close()
    assert all(gone(pid) for pid in (server, *below))
    pool.close()  # twice does no harm


def test_the_pools_process_is_killed(tmp_path):
    """Judges in the middle of a sample, a daemon and a sandboxed program: all end with it."""
    script = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_pool import *
        from rlhpc.language.rewards.code_reward import CodeReward
        terms = [Term("moody", moody), Term("code", CodeReward, 1.0, {{"timeout_s": 50}})]
        pool = RewardPool(terms, timeout_s=60, processes=2)
        endless = {{"tests": ["assert f() == 1"]}}
        pool.submit(0, Sample("q", "```python\\ndef f():\\n    while True: pass\\n```", meta=endless))
        pool.submit(1, Sample("q", "daemon {tmp_path / "pid"} 60", meta=endless))
        pool.poll(1.0)
        print(pool._server.pid, flush=True)
        pool.poll(60)
        """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    server = int(child.stdout.readline())
    below = [process.pid for process in psutil.Process(server).children(recursive=True)]
    daemon = int((tmp_path / "pid").read_text())
    assert daemon in below and len(below) >= 5  # two judges, the daemon, a keeper and its program
    child.kill()
    child.wait()
    child.stdout.close()
    assert all(gone(pid) for pid in (server, *below))
    assert [path for path in tmp_path.iterdir() if path.name != "pid"] == []


def test_files_of_judges_go_with_the_session_of_a_rank_that_was_killed() -> None:
    """They are in its folder, which the next session of this user removes from the host, or `rlhpc clean`."""
    with temporary_scratch() as scratch:
        with RewardPool([Term("moody", moody)], timeout_s=60, processes=1) as pool:
            (folder,) = scratch.sockets.glob("rlhpc-judges-*")
            assert str(folder) == pool._folder
        assert not folder.exists()
