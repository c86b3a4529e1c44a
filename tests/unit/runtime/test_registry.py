"""A registry that somebody removes: what is known is used while the run is the current one, and else it is said at once."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhpc.runtime import registry as watch
from rlhpc.runtime.comm.context import Context
from rlhpc.runtime.errors import RendezvousTimeout, RlhpcError, StaleGeneration
from rlhpc.runtime.registry import CurveKeys, GenerationFolder, RegistryWatch
from tests.at_each_line import at_each_line

KEYS = CurveKeys(b"public", b"secret")


@pytest.fixture
def registry(tmp_path: Path) -> GenerationFolder:
    made = GenerationFolder.create(tmp_path / "run" / "registry", "local-0")
    made.save_keys(KEYS)
    return made


@pytest.fixture
def context(registry: GenerationFolder) -> Context:
    registry.put("members", "env-0", {"group": "env", "rank": 0})
    made = Context("driver", registry, cast(Any, SimpleNamespace(epoch=0)))
    assert made.rank_record("env", 0)["group"] == "env"
    return made


def test_a_known_member_is_still_known_when_its_generations_folder_was_removed(context: Context) -> None:
    shutil.rmtree(context.registry.root)
    assert context.rank_record("env", 0)["rank"] == 0


def test_an_unknown_member_is_not_waited_for_where_it_cannot_arrive(context: Context) -> None:
    shutil.rmtree(context.registry.root)
    with pytest.raises(StaleGeneration, match=r"the registry folder .*/local-0 was removed while the run went on"):
        context.rank_record("env", 1)


def test_a_member_that_was_taken_out_is_waited_for(context: Context) -> None:
    """It is started again: what was known of it is of a process that is gone."""
    context.registry.remove("members", "env-0")
    context.service.epoch += 1
    with pytest.raises(RendezvousTimeout, match="env-0"):
        context.rank_record("env", 0, timeout=0.05)


@pytest.mark.parametrize(("folder", "name"), [("run/registry", "registry"), ("run", "run folder")])
def test_a_registry_that_is_gone_is_said_at_once(context: Context, tmp_path: Path, folder: str, name: str) -> None:
    shutil.rmtree(tmp_path / folder)
    context.service.epoch += 1
    words = f"the {name} {tmp_path / folder} was removed while the run went on"
    for attempt in (lambda: context.rank_record("env", 0), lambda: context.registry.put("groups", "env", {})):
        with pytest.raises(StaleGeneration, match=words):
            attempt()
    assert not (tmp_path / folder).exists()


def test_the_driver_is_told_of_a_registry_that_was_made_anew(
    registry: GenerationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation's name comes again; its keys do not."""
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    told, happened = list[RlhpcError](), threading.Event()

    def fail(error: RlhpcError) -> None:
        told.append(error)
        happened.set()

    eye = RegistryWatch(registry, KEYS, fail)
    assert eye.owns_registry() and not happened.wait(0.1)
    parent = registry.root.parent
    replaced = parent.with_name("away")
    other = GenerationFolder.create_next(replaced)
    other.save_keys(CurveKeys(b"other", b"keys"))
    assert other.generation == registry.generation
    parent.rename(parent.with_name("old"))
    replaced.rename(parent)
    assert happened.wait(20)
    assert len(told) == 1 and not eye.owns_registry()
    assert isinstance(told[0], StaleGeneration) and ("made it anew" in str(told[0]) or "was removed" in str(told[0]))


def test_the_driver_is_told_of_another_generation(registry: GenerationFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    told, happened = list[str](), threading.Event()
    RegistryWatch(registry, KEYS, lambda error: (told.append(str(error)), happened.set())[0])  # type: ignore[func-returns-value]
    GenerationFolder.create(registry.root.parent, "local-1")
    assert happened.wait(20) and "local-0 was replaced by local-1" in told[0]


def test_the_first_record_of_a_kind_makes_its_folder(registry: GenerationFolder) -> None:
    registry.put("services", "node-7", {"addresses": {"tools": "node-7:8000"}})
    assert registry.get("services", "node-7") == {"generation": "local-0", "addresses": {"tools": "node-7:8000"}}
    assert (registry.root / "services").stat().st_mode & 0o777 == 0o700
    shutil.rmtree(registry.root)
    with pytest.raises((RlhpcError, OSError)):  # a registry that was removed is not made anew
        registry.put("services", "node-7", {})
    assert not registry.root.exists()


def test_an_outdated_listing_gives_no_generation_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of the first one's ranks would be read as those of the second."""
    parent = tmp_path / "run" / "registry"
    first = GenerationFolder.create_next(parent)
    first.put("members", "actor-0", {})
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    second, third = GenerationFolder.create_next(parent), GenerationFolder.create_next(parent)
    assert [each.generation for each in (first, second, third)] == ["local-0", "local-1", "local-2"]
    assert second.get("members", "actor-0") is None
    jobs = [GenerationFolder.create_next(parent, "9", "0").generation for _ in range(3)]
    assert jobs == ["9-0", "9-0.1", "9-0.2"]
    monkeypatch.undo()
    assert GenerationFolder.create_next(parent, "9", "0").generation == "9-0.3"
    assert GenerationFolder.create_next(parent, "9", "1").generation == "9-1"
    with pytest.raises(StaleGeneration, match="replaced by 9-1"):
        first.check_current()


def test_a_request_to_trace_that_is_made_while_another_is_taken_is_not_lost(tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> tuple[GenerationFolder, list[int]]:
        registry = GenerationFolder.create(tmp_path / str(next(numbers)) / "registry", "local-0")
        registry.request_trace(1)
        return registry, []

    def take(state: tuple[GenerationFolder, list[int]]) -> None:
        state[1].append(state[0].take_trace_request())

    for (registry, taken), line in at_each_line(prepare, take, lambda state: state[0].request_trace(2), "registry.py"):
        taken.append(registry.take_trace_request())
        assert taken in ([1, 2], [2, 0]), f"line {line}"
        assert not [path for path in registry.root.iterdir() if "trace" in path.name], f"line {line}"
