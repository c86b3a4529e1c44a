"""Data source of procedural tasks from `reasoning-gym`, and scoring of answers with the tasks' scorers."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from rlhpc.language.data.procedural import DEFAULT_SIZE, is_in_part, section_kwargs
from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.imports import python_path, run_module
from rlhpc.runtime.os_resources import readable_descriptors
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.similar_names import similar_names

if TYPE_CHECKING:
    from rlhpc.language.config.data import DataSourceConfig

_SEED_BLOCK = 2**20
"""Maximum number of problems per seed: the generator of a problem has the seed `seed * _SEED_BLOCK + position`."""
_PART_BLOCK = 2**31
"""Offset of evaluation seeds above training seeds. All seeds fit into 32 bits, which some tasks require."""
_UNORDERED = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
"""Tasks that sample from sets of texts, so that problems depend on the hash seed of the process."""
_SIZE_DEPENDENT = {"acre"}
"""Tasks in which problem i depends on the size of the dataset. Their problems are generated in chunks of fixed size."""
_TUPLE_TASKS = {"arc_agi", "rearc"}
"""Tasks whose scorers compare tuples; JSON converts tuples to lists."""
_CHUNK = 128
_TIMEOUT_S = 600

Entry = dict[str, Any]


class ReasoningGymProblems:
    """Problems of reasoning-gym tasks, the same in every process; training and evaluation use different seeds.

    Small tasks generate the same question from many seeds. To avoid overlap, set the same `eval_fraction` in training and
    evaluation: a hash of the question then decides its part, and no question is in both parts. Access to a problem then
    requires generating all problems before it.

    `meta` has `task`, `task_kwargs`, and `entry`, the argument of the task's `score_answer(answer, entry)` (see `score`).
    `answer` is the reference answer, or "" for tasks without a unique answer.

    Args:
        cfg: Section `data.train` or `data.eval[i]`. Its `kwargs` are `task` and arguments of the task. The argument
            `difficulty`, a level of the task's curriculum from 0 (easiest), sets all other arguments. Alternatively, `tasks`
            maps several tasks to their arguments; the problems of the tasks alternate.
        part: "train" or "eval".
        key: Name of the section in messages.

    Raises:
        ConfigError: A task or argument is unknown or invalid.
    """

    def __init__(self, cfg: DataSourceConfig, *, part: str, key: str) -> None:
        self._size = cfg.size or DEFAULT_SIZE[part]
        if self._size > _SEED_BLOCK:
            raise ConfigError(f"{key}.size is {self._size}; source reasoning_gym makes at most {_SEED_BLOCK}")
        self._part = part
        self._fraction = cfg.eval_fraction
        seed = (cfg.seed * _SEED_BLOCK) % _PART_BLOCK + (_PART_BLOCK if part == "eval" else 0)
        kwargs_of_section = section_kwargs(cfg)
        tasks = kwargs_of_section.pop("tasks", None)
        if tasks is None:
            tasks = {kwargs_of_section.pop("task", None): kwargs_of_section}
        elif kwargs_of_section:
            raise ConfigError(
                f"{key}.kwargs has {', '.join(kwargs_of_section)} beside tasks; put arguments below their task"
            )
        self._has_several_tasks = len(tasks) > 1
        self._streams = [_TaskStream(name, dict(kwargs or {}), seed, key) for name, kwargs in tasks.items()]
        self._accepted_seeds: list[list[int]] = [[] for _ in self._streams]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(index)
        turn, task_index = divmod(index, len(self._streams))
        stream = self._streams[task_index]
        problem_entry = stream[self._position(task_index, turn)] if self._fraction else stream[turn]
        return Prompt(
            id=index,
            messages=({"role": "user", "content": str(problem_entry["question"])},),
            answer="" if problem_entry["answer"] is None else str(problem_entry["answer"]),
            meta={"task": stream.task, "task_kwargs": stream.kwargs, "entry": problem_entry},
            response="" if problem_entry["answer"] is None else str(problem_entry["answer"]),
            level=stream.task if self._has_several_tasks else stream.level,
        )

    def _position(self, stream_index: int, turn: int) -> int:
        """Returns the position of question number `turn` of this part in the stream."""
        accepted_positions, stream = self._accepted_seeds[stream_index], self._streams[stream_index]
        next_position = accepted_positions[-1] + 1 if accepted_positions else 0
        num_rejected = 0
        while len(accepted_positions) <= turn:
            if is_in_part(str(stream[next_position]["question"]), self._part, self._fraction):
                accepted_positions.append(next_position)
                num_rejected = 0
            next_position, num_rejected = next_position + 1, num_rejected + 1
            if num_rejected > 100 / self._fraction:
                raise ConfigError(
                    f"task {stream.task} asks too few different questions for eval_fraction {self._fraction}: the last "
                    f"{num_rejected} all belong to the other part"
                )
        return accepted_positions[turn]


class _TaskStream:
    """Infinite sequence of a task's problems."""

    def __init__(self, task: Any, kwargs: dict[str, Any], seed: int, key: str) -> None:
        _check_task(task, kwargs, key)
        self.task = str(task)
        self.kwargs = kwargs
        self._seed = seed
        self.level = f"difficulty {kwargs['difficulty']}" if "difficulty" in kwargs else ""
        self._chunks: dict[int, Any] = {}
        self._num_planned = _CHUNK
        try:
            self._dataset = _create_dataset(self.task, kwargs, seed, self._num_planned)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"{key}.kwargs of task {task}: {error}") from None

    def __getitem__(self, position: int) -> Entry:
        if self.task in _UNORDERED and os.environ.get("PYTHONHASHSEED") != "0":
            return _ProblemProcess.of_this_process().entry(self.task, self.kwargs, self._seed, position)
        if self.task in _SIZE_DEPENDENT:
            chunk, offset = divmod(position, _CHUNK)
            if chunk not in self._chunks:
                self._chunks[chunk] = _create_dataset(self.task, self.kwargs, self._seed + chunk, _CHUNK)
            return _generate_entry(self._chunks[chunk], offset)
        if position >= self._num_planned:
            # Some tasks plan their problems in the constructor. A longer plan begins with the shorter plan's problems.
            self._num_planned = 2 * position
            self._dataset = _create_dataset(self.task, self.kwargs, self._seed, self._num_planned)
        return _generate_entry(self._dataset, position)


def score(answer: str | None, meta: dict[str, Any]) -> float:
    """Scores an answer from 0 to 1 with the task's scorer; returns 0 if the scorer raises an error.

    Args:
        answer: The model's answer, without surrounding text.
        meta: Metadata of the problem, possibly decoded from JSON.
    """
    task, problem_entry = meta["task"], meta["entry"]
    if task in _TUPLE_TASKS:
        problem_entry = {**problem_entry, "metadata": _as_tuples(problem_entry["metadata"])}
    scorer = _load_scorer(task, json.dumps(meta["task_kwargs"], sort_keys=True))
    try:
        return float(scorer.score_answer(answer, problem_entry))
    except Exception:
        # Scorers parse the model's text; some raise errors on unexpected input.
        return 0.0


@functools.lru_cache(maxsize=64)
def _load_scorer(task: str, kwargs: str) -> Any:
    return _create_dataset(task, json.loads(kwargs), 0, 10)


def _import_reasoning_gym() -> Any:
    return require_package("reasoning_gym.factory", "source reasoning_gym needs reasoning-gym")


def _check_task(task: Any, kwargs: dict[str, Any], key: str) -> None:
    """Checks the name and the arguments of a task."""
    factory = _import_reasoning_gym()
    if task not in factory.DATASETS or task == "composite":
        close_names = similar_names(str(task or ""), factory.DATASETS, 1)
        suggestion = (
            f"; did you mean {close_names[0]!r}?"
            if close_names
            else f"; there are {', '.join(sorted(factory.DATASETS))}"
        )
        complaint = "is not set" if task is None else f"is {task!r}, which reasoning-gym does not have"
        raise ConfigError(f"{key}.kwargs.task {complaint}{suggestion}")
    argument_names = {field.name for field in dataclasses.fields(factory.DATASETS[task][1])} - {"seed", "size"}
    if factory.has_curriculum(task):
        argument_names.add("difficulty")
    for name in kwargs:
        if name not in argument_names:
            other_key = f" ({key}.{name} says it)" if name in ("seed", "size") else ""
            raise ConfigError(
                f"{key}.kwargs.{name} is no argument of task {task}{other_key}; allowed: {', '.join(sorted(argument_names))}"
            )
    if "difficulty" in kwargs:
        levels = [len(attribute.levels) for attribute in factory.create_curriculum(task).attributes.values()]
        if not isinstance(kwargs["difficulty"], int) or not 0 <= kwargs["difficulty"] < max(levels):
            raise ConfigError(
                f"{key}.kwargs.difficulty of task {task} is {kwargs['difficulty']!r}; allowed: 0 to {max(levels) - 1}"
            )


def _create_dataset(task: str, kwargs: dict[str, Any], seed: int, num_problems: int) -> Any:
    factory = _import_reasoning_gym()
    task_options = {name: option_value for name, option_value in kwargs.items() if name != "difficulty"}
    if "difficulty" not in kwargs:
        return factory.create_dataset(task, **task_options, seed=seed, size=num_problems)
    curriculum = factory.create_curriculum(task)
    curriculum.set_global_level(kwargs["difficulty"])
    config = dataclasses.replace(curriculum.generate_configuration({}), **task_options, seed=seed, size=num_problems)
    if hasattr(config, "validate"):
        config.validate()
    return factory.DATASETS[task][0](config=config)


def _generate_entry(dataset: Any, entry_position: int) -> Entry:
    """Generates a task's problem.

    Some tasks use the global generators of `random` and NumPy. Both are seeded for the call and restored afterwards.
    """
    import numpy as np

    random_states = random.getstate(), np.random.get_state()
    random.seed(dataset.seed + entry_position)
    np.random.seed((dataset.seed + entry_position) % 2**32)
    try:
        problem_entry: Entry = _to_jsonable(dataset[entry_position])
    finally:
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])
    return problem_entry


class _ProblemProcess:
    """Subprocess with hash seed 0 that generates problems on request and ends with the process that started it."""

    _current_process: _ProblemProcess | None = None

    @classmethod
    def of_this_process(cls) -> _ProblemProcess:
        """Returns the subprocess of this process; starts a subprocess in the first call, and after a fork."""
        if cls._current_process is None or cls._current_process._owner != os.getpid():
            cls._current_process = cls()
        return cls._current_process

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            run_module("rlhpc.language.data.reasoning_gym"),
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._stop_process)

    def entry(self, task: str, kwargs: dict[str, Any], seed: int, entry_position: int) -> Entry:
        """Requests one problem from the subprocess.

        Raises:
            DeadlineExceeded: The subprocess did not answer within `_TIMEOUT_S` seconds.
            RlhpcError: The subprocess ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with self._lock:
            try:
                requests.write(json.dumps([task, kwargs, seed, entry_position]).encode() + b"\n")
                requests.flush()
                if not readable_descriptors([answers.fileno()], _TIMEOUT_S):
                    raise DeadlineExceeded(f"problem {entry_position} of {task} was not made in {_TIMEOUT_S} s")
                problem_entry: Entry = pickle.load(answers)
            except (OSError, EOFError) as error:
                _ProblemProcess._current_process = None
                raise RlhpcError(f"the process that makes problems of {task} ended; its messages are above") from error
        return problem_entry

    def _stop_process(self) -> None:
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()


def _serve() -> None:
    """Runs the subprocess of a `_ProblemProcess`: reads requests from stdin and writes pickled problems to stdout."""
    output_stream, sys.stdout = sys.stdout.buffer, sys.stderr  # some tasks print
    task_streams: dict[str, _TaskStream] = {}
    for line in sys.stdin:
        task, kwargs, seed, entry_position = json.loads(line)
        name = json.dumps([task, kwargs, seed])
        if name not in task_streams:
            task_streams[name] = _TaskStream(task, kwargs, seed, "data")
        output_stream.write(pickle.dumps(task_streams[name][entry_position]))
        output_stream.flush()


def _to_jsonable(entry_value: Any) -> Any:
    """Converts values of types that JSON does not support, such as fractions, to texts."""
    if isinstance(entry_value, dict):
        return {name: _to_jsonable(child) for name, child in entry_value.items()}
    if isinstance(entry_value, (list, tuple)):
        return type(entry_value)(map(_to_jsonable, entry_value))
    return entry_value if entry_value is None or isinstance(entry_value, (str, int, float)) else str(entry_value)


def _as_tuples(json_value: Any) -> Any:
    if isinstance(json_value, dict):
        return {name: _as_tuples(child) for name, child in json_value.items()}
    return tuple(map(_as_tuples, json_value)) if isinstance(json_value, (list, tuple)) else json_value


if __name__ == "__main__":
    _serve()
