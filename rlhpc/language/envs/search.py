"""Search environment: questions about generated pages, which the model answers with a search tool.

Each page describes a person's home, product and kin. A question with one hop is `home of kob?`. A question with two hops is
`home of kin of kob?`, which needs a second search for the person that the first search returned.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import EnvResponse, Step, Task, ToolEnvironment, tool
from rlhpc.runtime.errors import ConfigError

_FACTS = ("home", "make")
_FIRST, _MIDDLE = "bdfgjklmnprstvz", "aeiou"
_PLACES = 60
#: Maximum number of pages: the number of names minus the number of places.
_MAX_PAGES = len(_FIRST) ** 2 * len(_MIDDLE) - _PLACES


class Bm25:
    """Search index of texts by BM25 (Robertson and Zaragoza 2009).

    Args:
        texts: Texts of the index.
        k1, b: Saturation of a word's count, and weight of a text's length.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        counts_by_text = [Counter(_split_words(page_text)) for page_text in texts]
        mean_length = sum(word_counts.total() for word_counts in counts_by_text) / max(len(texts), 1)
        self._postings: dict[str, list[tuple[int, float]]] = {}
        for text_index, word_counts in enumerate(counts_by_text):
            length_norm = k1 * (1 - b + b * word_counts.total() / mean_length)
            for word_key, word_count in word_counts.items():
                self._postings.setdefault(word_key, []).append(
                    (text_index, word_count * (k1 + 1) / (word_count + length_norm))
                )
        self._num_texts = len(texts)

    def best(self, query: str, count: int) -> list[int]:
        """Returns the indices of the best texts, in descending order of score; equal scores are ordered by index. Omits texts
        without a word of the query.
        """
        scores = Counter[int]()
        for query_word in _split_words(query):
            word_postings = self._postings.get(query_word, [])
            inverse_frequency = math.log(1 + (self._num_texts - len(word_postings) + 0.5) / (len(word_postings) + 0.5))
            for text_index, score in word_postings:
                scores[text_index] += inverse_frequency * score  # type: ignore[assignment]
        return sorted(scores, key=lambda text_index: (-scores[text_index], text_index))[:count]


class PageIndex:
    """Generated pages with a search index.

    Args:
        num_pages: Number of pages, up to 1065.
        seed: Seed of the pages.

    Raises:
        ConfigError: There are fewer names than pages.
    """

    def __init__(self, num_pages: int, seed: int) -> None:
        if not 1 <= num_pages <= _MAX_PAGES:
            raise ConfigError(f"kwargs.pages of the environment search is {num_pages}; allowed: 1 to {_MAX_PAGES}")
        rng = random.Random(f"search {seed}")
        full_names = [
            first_name + middle_name + last_name
            for first_name in _FIRST
            for middle_name in _MIDDLE
            for last_name in _FIRST
        ]
        rng.shuffle(full_names)
        self.names, self.values = full_names[:num_pages], full_names[num_pages : num_pages + _PLACES]
        self.facts = {
            name: {**{fact_name: rng.choice(self.values) for fact_name in _FACTS}, "kin": rng.choice(self.names)}
            for name in self.names
        }
        # The title counts twice, so that a person's page ranks above pages that mention the person as kin.
        self._bm25 = Bm25([f"{name} {self.page(name)}" for name in self.names])

    def page(self, name: str) -> str:
        """Returns the text of a page: `kob: home tal, make rin, kin ruf.`"""
        return (
            f"{name}: "
            + ", ".join(f"{fact_name} {fact_value}" for fact_name, fact_value in self.facts[name].items())
            + "."
        )

    def search(self, query: str, count: int) -> list[str]:
        """Returns the best pages for a query."""
        return [self.page(self.names[page_index]) for page_index in self._bm25.best(query, count)]


@functools.lru_cache(maxsize=8)
def get_page_index(num_pages: int, seed: int) -> PageIndex:
    """Returns the pages of a seed; builds them once per process."""
    return PageIndex(num_pages, seed)


class Search(ToolEnvironment):
    """Question answering with a search tool; the reward is 1 for the exact word.

    Args:
        results: Number of pages that a search returns.
        closed: Whether searches return nothing, to measure the performance without the tool.
    """

    def __init__(self, results: int = 1, closed: bool = False) -> None:
        super().__init__()
        self._max_results, self._is_closed = results, closed
        self._num_searches = 0

    @classmethod
    def count(cls, pages: int = 400, world: int = 0, hops: Sequence[int] = (1, 2), careless: float = 0.0) -> int:
        """Returns the number of problems: persons × facts × hops."""
        return len(get_page_index(pages, world).names) * len(_FACTS) * len(hops)

    @classmethod
    def problem(
        cls, number: int, pages: int = 400, world: int = 0, hops: Sequence[int] = (1, 2), careless: float = 0.0
    ) -> Prompt:
        """Returns a problem with a question.

        Args:
            number: Index of the problem.
            pages, world: Number and seed of the pages.
            hops: Numbers of pages to look up; each number is one kind of question.
            careless: Fraction of the demonstrations that answer without a search.
        """
        quotient, hop_index = divmod(number, len(hops))
        person, fact_index = divmod(quotient, len(_FACTS))
        page_index = get_page_index(pages, world)
        name = page_index.names[person]
        question = f"{_FACTS[fact_index]} of {'kin of ' * (hops[hop_index] - 1)}{name}?"
        for _ in range(hops[hop_index] - 1):
            name = page_index.facts[name]["kin"]
        meta = {"pages": pages, "world": world, "careless": careless}
        messages = ({"role": "user", "content": question},)
        return Prompt(
            number, messages, page_index.facts[name][_FACTS[fact_index]], meta, level=f"{hops[hop_index]} hops"
        )

    def reset(self, task: Task) -> EnvResponse:
        """Starts the episode; the observation is the task's question."""
        self._task, self._world = task, get_page_index(task.meta["pages"], task.meta["world"])
        self._result_text = ""
        return None

    @tool
    def search(self, query: str) -> str:
        """Returns the pages that fit a query best."""
        self._num_searches += 1
        result_pages = [] if self._is_closed else self._world.search(query, self._max_results)
        self._result_text = "\n".join(result_pages) or "nothing."
        return self._result_text

    def answer(self, text: str) -> EnvResponse:
        """Ends the episode with reward 1 for the exact word."""
        is_right = text.strip().strip(".").lower() == self._task.answer
        return Step(reward=float(is_right), done=True, metrics={"searches": float(self._num_searches)})

    def demonstrate(self, rng: random.Random) -> str:
        """Returns a search for the person, then a search for each relation, then the answer."""
        fact_name, *relations, person = re.findall(r"\w+", self._task.question.replace(" of ", " "))
        if not self._num_searches and rng.random() < self._task.meta["careless"]:
            return rng.choice(self._world.values)
        if self._num_searches > len(relations):
            return self._find_fact(fact_name)
        return f"search: {person if not self._num_searches else self._find_fact('kin')}"

    def _find_fact(self, name: str) -> str:
        fact_match = re.search(rf"\b{name} (\w+)", self._result_text)
        return fact_match[1] if fact_match else "nothing"


def _split_words(page_text: str) -> list[str]:
    return re.findall(r"\w+", page_text.lower())
