"""Questions about pages that nobody knows by heart: they are made by rule, and found by searching.

A page is about somebody and says where they are at home, what they make, and who their kin is. One hop: `home of kob?`; two:
`home of kin of kob?`, which takes a search for what the first one found.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import Said, Step, Task, ToolEnvironment, tool
from rlhpc.runtime.errors import ConfigError

_FACTS = ("home", "make")
_FIRST, _MIDDLE = "bdfgjklmnprstvz", "aeiou"
_PLACES = 60
#: Names that there are, less those of places.
_MOST_PAGES = len(_FIRST) ** 2 * len(_MIDDLE) - _PLACES


class Bm25:
    """Finds texts by words (Robertson and Zaragoza 2009).

    Args:
        texts: What is searched.
        k1, b: Saturation of a word's count, and how much a text's length counts.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        counts = [Counter(_words(text)) for text in texts]
        mean = sum(found.total() for found in counts) / max(len(texts), 1)
        self._found: dict[str, list[tuple[int, float]]] = {}
        for at, words in enumerate(counts):
            room = k1 * (1 - b + b * words.total() / mean)
            for word, count in words.items():
                self._found.setdefault(word, []).append((at, count * (k1 + 1) / (count + room)))
        self._texts = len(texts)

    def best(self, query: str, most: int) -> list[int]:
        """The texts that fit best, the best one first; of equal ones the first. None without a word of the query."""
        scores = Counter[int]()
        for word in _words(query):
            known = self._found.get(word, [])
            rare = math.log(1 + (self._texts - len(known) + 0.5) / (len(known) + 0.5))
            for at, score in known:
                scores[at] += rare * score  # type: ignore[assignment]
        return sorted(scores, key=lambda at: (-scores[at], at))[:most]


class PageIndex:
    """Pages, and an index of them.

    Args:
        pages: Their number, up to 1065.
        seed: Seed of the world.

    Raises:
        ConfigError: There are no names for so many pages.
    """

    def __init__(self, pages: int, seed: int) -> None:
        if not 1 <= pages <= _MOST_PAGES:
            raise ConfigError(f"kwargs.pages of the environment search is {pages}; allowed: 1 to {_MOST_PAGES}")
        rng = random.Random(f"search {seed}")
        names = [a + b + c for a in _FIRST for b in _MIDDLE for c in _FIRST]
        rng.shuffle(names)
        self.names, self.values = names[:pages], names[pages : pages + _PLACES]
        self.facts = {
            name: {**{fact: rng.choice(self.values) for fact in _FACTS}, "kin": rng.choice(self.names)}
            for name in self.names
        }
        # The title counts twice: who is searched for comes before those whose kin they are.
        self._index = Bm25([f"{name} {self.page(name)}" for name in self.names])

    def page(self, name: str) -> str:
        """`kob: home tal, make rin, kin ruf.`"""
        return f"{name}: " + ", ".join(f"{fact} {value}" for fact, value in self.facts[name].items()) + "."

    def search(self, query: str, most: int) -> list[str]:
        """The pages that fit best."""
        return [self.page(self.names[at]) for at in self._index.best(query, most)]


@functools.lru_cache(maxsize=8)
def world_of(pages: int, seed: int) -> PageIndex:
    """A world, made once in a process."""
    return PageIndex(pages, seed)


class Search(ToolEnvironment):
    """Answers a question with a tool that searches; the reward is 1 for the exact word.

    Args:
        results: Pages that a search gives.
        closed: A search finds nothing: what can be had without the tool.
    """

    def __init__(self, results: int = 1, closed: bool = False) -> None:
        super().__init__()
        self._results, self._closed = results, closed
        self._searches = 0

    @classmethod
    def count(cls, pages: int = 400, world: int = 0, hops: Sequence[int] = (1, 2), careless: float = 0.0) -> int:
        """Who is asked for, what about them, over how many pages."""
        return len(world_of(pages, world).names) * len(_FACTS) * len(hops)

    @classmethod
    def problem(
        cls, number: int, pages: int = 400, world: int = 0, hops: Sequence[int] = (1, 2), careless: float = 0.0
    ) -> Prompt:
        """A question.

        Args:
            number: Which.
            pages, world: How many pages there are, and which.
            hops: Pages that have to be found, as many kinds of questions.
            careless: Part of the demonstrations that answer without a look.
        """
        rest, hop = divmod(number, len(hops))
        who, what = divmod(rest, len(_FACTS))
        here = world_of(pages, world)
        name = here.names[who]
        question = f"{_FACTS[what]} of {'kin of ' * (hops[hop] - 1)}{name}?"
        for _ in range(hops[hop] - 1):
            name = here.facts[name]["kin"]
        meta = {"pages": pages, "world": world, "careless": careless}
        messages = ({"role": "user", "content": question},)
        return Prompt(number, messages, here.facts[name][_FACTS[what]], meta, level=f"{hops[hop]} hops")

    def reset(self, task: Task) -> Said:
        """The question, as it is put."""
        self._task, self._world = task, world_of(task.meta["pages"], task.meta["world"])
        self._seen = ""
        return None

    @tool
    def search(self, query: str) -> str:
        """The pages that fit a query best."""
        self._searches += 1
        pages = [] if self._closed else self._world.search(query, self._results)
        self._seen = "\n".join(pages) or "nothing."
        return self._seen

    def answer(self, text: str) -> Said:
        """1 for the exact word."""
        right = text.strip().strip(".").lower() == self._task.answer
        return Step(reward=float(right), done=True, metrics={"searches": float(self._searches)})

    def demonstrate(self, rng: random.Random) -> str:
        """Searches for who is asked about, then for their kin, then reads off the answer."""
        what, *kin, who = re.findall(r"\w+", self._task.question.replace(" of ", " "))
        if not self._searches and rng.random() < self._task.meta["careless"]:
            return rng.choice(self._world.values)
        if self._searches > len(kin):
            return self._fact(what)
        return f"search: {who if not self._searches else self._fact('kin')}"

    def _fact(self, name: str) -> str:
        found = re.search(rf"\b{name} (\w+)", self._seen)
        return found[1] if found else "nothing"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
