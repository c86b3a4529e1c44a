"""The procedural tasks of `reasoning-gym`, by name and difficulty, and their scorers."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rlhpc.data.parts import DEFAULT_SIZE, arguments, belongs
from rlhpc.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError, RlhpcError

_SEED_BLOCK = 2**20
"""A problem's generator is seeded by seed · block + position: two seeds share no problem's generator."""
_PART_BLOCK = 2**31
"""Evaluation's seeds lie above training's. Together they fit into the 32 bits that some tasks ask for."""
_UNORDERED = {"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Tasks that draw from sets of texts, so that their problems depend on the process's hash seed."""
_PLANNED_WHOLE = {"acre"}
"""Tasks whose problem i depends on how many are made: they are made by the chunk."""
_GRIDS = {"arc_agi", "rearc"}
"""Tasks whose scorers compare tuples, which JSON turns into lists."""
_CHUNK = 128

Entry = dict[str, Any]


class ReasoningGymProblems:
    """Problem i of seed s of a task: the same in every process; training and evaluation never share a generator's seed.

    Small tasks ask the same question under many seeds. Where that matters, set `eval_fraction` (the same in training
    and evaluation): then a hash of the question decides its part too, and no question is in both; the problems before
    one must then be made to know which it is.

    `meta` has `task`, `task_kwargs`, and `entry`, which is what the task's `score_answer(answer, entry)` takes (see
    `score`); `answer` is the reference, "" for tasks that accept many.

    Args:
        cfg: A section `data.train` or `data.eval[i]`. `kwargs`: `task`, and the task's own arguments beside it;
            `difficulty`, a level of the task's curriculum, 0 the easiest, sets them all. Or `tasks`, a mapping of task to
            such arguments, whose problems take turns.
        part: "train" or "eval".
        key: What messages call the section.

    Raises:
        ConfigError: Unknown task or argument.
    """

    def __init__(self, cfg: Any, *, part: str, key: str) -> None:
        self._size = cfg.size or DEFAULT_SIZE[part]
        if self._size > _SEED_BLOCK:
            raise ConfigError(f"{key}.size is {self._size}; source reasoning_gym makes at most {_SEED_BLOCK}")
        self._part, self._fraction = part, float(cfg.eval_fraction)
        seed = (cfg.seed * _SEED_BLOCK) % _PART_BLOCK + (_PART_BLOCK if part == "eval" else 0)
        given = arguments(cfg)
        tasks = given.pop("tasks", None)
        if tasks is None:
            tasks = {given.pop("task", None): given}
        elif given:
            raise ConfigError(f"{key}.kwargs has {', '.join(given)} beside tasks; put arguments below their task")
        self._several = len(tasks) > 1
        self._streams = [_Stream(name, dict(kwargs or {}), seed, key) for name, kwargs in tasks.items()]
        self._accepted: list[list[int]] = [[] for _ in self._streams]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(index)
        turn, which = divmod(index, len(self._streams))
        stream = self._streams[which]
        entry = stream[self._position(which, turn)] if self._fraction else stream[turn]
        return Prompt(
            id=index,
            messages=({"role": "user", "content": str(entry["question"])},),
            answer="" if entry["answer"] is None else str(entry["answer"]),
            meta={"task": stream.task, "task_kwargs": stream.kwargs, "entry": entry},
            response="" if entry["answer"] is None else str(entry["answer"]),
            level=stream.task if self._several else stream.level,
        )

    def _position(self, which: int, turn: int) -> int:
        """Where a stream has the question number `turn` of those that belong to the part."""
        accepted, stream = self._accepted[which], self._streams[which]
        position = accepted[-1] + 1 if accepted else 0
        tried = 0
        while len(accepted) <= turn:
            if belongs(str(stream[position]["question"]), self._part, self._fraction):
                accepted.append(position)
                tried = 0
            position, tried = position + 1, tried + 1
            if tried > 100 / self._fraction:
                raise ConfigError(
                    f"task {stream.task} asks too few different questions for eval_fraction {self._fraction}: the last "
                    f"{tried} all belong to the other part"
                )
        return accepted[turn]


class _Stream:
    """The problems of one task, by position, without end."""

    def __init__(self, task: Any, kwargs: dict[str, Any], seed: int, key: str) -> None:
        _check(task, kwargs, key)
        self.task, self.kwargs, self._seed = str(task), kwargs, seed
        self.level = f"difficulty {kwargs['difficulty']}" if "difficulty" in kwargs else ""
        self._chunks: dict[int, list[Entry]] = {}
        self._planned = _CHUNK
        try:
            self._dataset = _create(self.task, kwargs, seed, self._planned)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"{key}.kwargs of task {task}: {error}") from None

    def __getitem__(self, position: int) -> Entry:
        unordered = self.task in _UNORDERED and os.environ.get("PYTHONHASHSEED") != "0"
        if unordered or self.task in _PLANNED_WHOLE:
            chunk, inside = divmod(position, _CHUNK)
            if chunk not in self._chunks:
                make = _in_fixed_order if unordered else _chunk
                self._chunks[chunk] = make(self.task, self.kwargs, self._seed, chunk)
            return self._chunks[chunk][inside]
        if position >= self._planned:
            # Some tasks plan so many problems when they are made; a longer plan begins with the shorter one.
            self._planned = 2 * position
            self._dataset = _create(self.task, self.kwargs, self._seed, self._planned)
        with _numpy_undisturbed():
            entry: Entry = self._dataset[position]
        return entry


def score(answer: str | None, meta: dict[str, Any]) -> float:
    """What the task's own scorer says of an answer, from 0 to 1.

    Args:
        answer: As the model gave it, without the words around it.
        meta: Of the problem; may have been through JSON.
    """
    task, entry = meta["task"], meta["entry"]
    if task in _GRIDS:
        entry = {**entry, "metadata": _as_tuples(entry["metadata"])}
    return float(_scorer(task, json.dumps(meta["task_kwargs"], sort_keys=True)).score_answer(answer, entry))


@functools.lru_cache(maxsize=64)
def _scorer(task: str, kwargs: str) -> Any:
    return _create(task, json.loads(kwargs), 0, 10)


def _gym() -> Any:
    try:
        import reasoning_gym.factory
    except ImportError:
        raise ConfigError("source reasoning_gym needs reasoning-gym: pip install 'rlhpc[llm]'") from None
    return reasoning_gym.factory


def _check(task: Any, kwargs: dict[str, Any], key: str) -> None:
    factory = _gym()
    if task not in factory.DATASETS or task == "composite":
        near = difflib.get_close_matches(str(task or ""), factory.DATASETS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(factory.DATASETS))}"
        found = "is not set" if task is None else f"is {task!r}, which reasoning-gym does not have"
        raise ConfigError(f"{key}.kwargs.task {found}{hint}")
    allowed = {field.name for field in dataclasses.fields(factory.DATASETS[task][1])} - {"seed", "size"}
    if factory.has_curriculum(task):
        allowed.add("difficulty")
    for name in kwargs:
        if name not in allowed:
            elsewhere = f" ({key}.{name} says it)" if name in ("seed", "size") else ""
            raise ConfigError(
                f"{key}.kwargs.{name} is no argument of task {task}{elsewhere}; allowed: {', '.join(sorted(allowed))}"
            )
    if "difficulty" in kwargs:
        levels = [len(attribute.levels) for attribute in factory.create_curriculum(task).attributes.values()]
        if not isinstance(kwargs["difficulty"], int) or not 0 <= kwargs["difficulty"] < max(levels):
            raise ConfigError(
                f"{key}.kwargs.difficulty of task {task} is {kwargs['difficulty']!r}; allowed: 0 to {max(levels) - 1}"
            )


def _create(task: str, kwargs: dict[str, Any], seed: int, size: int) -> Any:
    factory = _gym()
    named = {name: value for name, value in kwargs.items() if name != "difficulty"}
    if "difficulty" not in kwargs:
        return factory.create_dataset(task, **named, seed=seed, size=size)
    curriculum = factory.create_curriculum(task)
    curriculum.set_global_level(kwargs["difficulty"])
    config = dataclasses.replace(curriculum.generate_configuration({}), **named, seed=seed, size=size)
    if hasattr(config, "validate"):
        config.validate()
    return factory.DATASETS[task][0](config=config)


def _chunk(task: str, kwargs: dict[str, Any], seed: int, chunk: int) -> list[Entry]:
    if task in _PLANNED_WHOLE:
        whole = _create(task, kwargs, seed + chunk, _CHUNK)
        return [whole[inside] for inside in range(_CHUNK)]
    dataset = _create(task, kwargs, seed, (chunk + 1) * _CHUNK)
    return [dataset[chunk * _CHUNK + inside] for inside in range(_CHUNK)]


def _in_fixed_order(task: str, kwargs: dict[str, Any], seed: int, chunk: int) -> list[Entry]:
    """A chunk made by a process whose hash seed is 0."""
    asked = json.dumps([task, kwargs, seed, chunk])
    done = subprocess.run(
        [sys.executable, "-m", "rlhpc.data.reasoning", asked],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RlhpcError(f"problems of {task} could not be made: {done.stderr.decode(errors='replace').strip()}")
    entries: list[Entry] = pickle.loads(done.stdout)
    return entries


@contextlib.contextmanager
def _numpy_undisturbed() -> Iterator[None]:
    # One task seeds numpy's global generator, which may be somebody else's.
    import numpy as np

    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_tuples(inner) for name, inner in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _main() -> None:
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # some tasks print
    out.write(pickle.dumps(_chunk(*json.loads(sys.argv[1]))))


if __name__ == "__main__":
    _main()
