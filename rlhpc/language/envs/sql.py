"""SQL environment: generated questions about tables."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from typing import Any

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import EnvResponse, Step, Task, ToolEnvironment, tool

_TABLES = "person(name, age, city), city(name, country)"
_NAMES = (
    "Ana",
    "Ben",
    "Cai",
    "Dov",
    "Eli",
    "Fay",
    "Gus",
    "Hal",
    "Ida",
    "Jon",
    "Kim",
    "Lea",
    "Max",
    "Noa",
    "Ola",
    "Pia",
)
_CITIES = ("Arle", "Brun", "Cole", "Dahl", "Este", "Ferr")
_COUNTRIES = ("Norland", "Sudland", "Ostland")
_QUESTIONS = (
    ("How many people live in {city}?", "SELECT count(*) FROM person WHERE city = '{city}'"),
    ("How old is {name}?", "SELECT age FROM person WHERE name = '{name}'"),
    (
        "What is the greatest age of anybody in {city}?",
        "SELECT coalesce(max(age), 0) FROM person WHERE city = '{city}'",
    ),
    (
        "How many people live in {country}?",
        "SELECT count(*) FROM person JOIN city ON person.city = city.name WHERE country = '{country}'",
    ),
    (
        "In which country does {name} live?",
        "SELECT country FROM person JOIN city ON person.city = city.name WHERE person.name = '{name}'",
    ),
)
#: Time limit of a query in seconds, and maximum number of rows of its result.
_MAX_QUERY_S, _MAX_ROWS = 1.0, 50
#: Maximum bytes of a value and of a query; and opcodes between two checks of the time. Opcodes are fast on small values.
_MAX_BYTES, _OPCODES = 1 << 14, 100
#: Functions with a run time that grows with a number in their arguments, even if their result is short.
_SLOW_FUNCTIONS = ("printf", "format")


class Sql(ToolEnvironment):
    """Question answering about tables with a SQL tool; the reward is 1 for the exact answer."""

    @classmethod
    def problem(cls, number: int) -> Prompt:
        """Returns a problem with tables and a question."""
        rng = random.Random(f"sql {number}")
        template, query_template = rng.choice(_QUESTIONS)
        query_fields = {"name": rng.choice(_NAMES), "city": rng.choice(_CITIES), "country": rng.choice(_COUNTRIES)}
        question = f"Tables: {_TABLES}. {template.format(**query_fields)}"
        meta = {"seed": number, "query": query_template.format(**query_fields), "part": str(number)}
        with contextlib.closing(tables(number)) as connection:
            answer = str(connection.execute(str(meta["query"])).fetchone()[0])
        return Prompt(number, ({"role": "user", "content": question},), answer, meta, level=template)

    def reset(self, task: Task) -> EnvResponse:
        """Creates the tables; the observation is the task's question."""
        self._task, self._connection = task, tables(task.meta["seed"])
        self._result_text = ""
        return None

    @tool
    def query(self, sql: str) -> str:
        """Returns the rows of a query in SQL."""
        deadline = time.monotonic() + _MAX_QUERY_S
        self._connection.set_progress_handler(lambda: time.monotonic() > deadline, _OPCODES)
        rows = self._connection.execute(sql).fetchmany(_MAX_ROWS)
        self._result_text = "\n".join(" | ".join(map(str, row)) for row in rows) or "no rows"
        return self._result_text

    def answer(self, text: str) -> EnvResponse:
        """Ends the episode with reward 1 for the exact answer."""
        return Step(reward=float(text.strip().strip(".") == self._task.answer), done=True)

    def demonstrate(self, rng: random.Random) -> str:
        """Returns a query first, then its result as the answer."""
        return self._result_text or f"query: {self._task.meta['query']}"

    def close(self) -> None:
        """Closes the tables."""
        self._connection.close()


def tables(seed: int) -> sqlite3.Connection:
    """Creates the tables in memory. The connection can neither change them nor open files."""
    rng = random.Random(f"tables {seed}")
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE TABLE city(name TEXT, country TEXT)")
    connection.execute("CREATE TABLE person(name TEXT, age INTEGER, city TEXT)")
    connection.executemany("INSERT INTO city VALUES (?, ?)", [(city, rng.choice(_COUNTRIES)) for city in _CITIES])
    person_rows = [(name, rng.randint(18, 90), rng.choice(_CITIES)) for name in _NAMES]
    connection.executemany("INSERT INTO person VALUES (?, ?, ?)", person_rows)
    connection.commit()
    allowed_actions = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

    def authorize(action: int, _: str | None, name: str | None, *__: Any) -> int:
        is_slow = action == sqlite3.SQLITE_FUNCTION and str(name).lower() in _SLOW_FUNCTIONS
        return sqlite3.SQLITE_OK if action in allowed_actions and not is_slow else sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)
    for limit_id in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
        connection.setlimit(limit_id, _MAX_BYTES)
    return connection
