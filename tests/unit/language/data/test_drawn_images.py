"""Drawn image problems: answers, parts and arguments."""

from __future__ import annotations

import io
from typing import Any

import pytest

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

need_extra("llm")

from PIL import Image

from rlhpc.language.data.drawn_images import DrawnProblems

WHITE = (255, 255, 255)


def problems(part: str = "train", size: int = 40, seed: int = 1, **kwargs: Any) -> DrawnProblems:
    """Returns the problems of a section with these arguments."""
    section: Any = default_section(GrpoConfig).data.train
    section.source, section.size, section.seed, section.kwargs = "drawn", size, seed, kwargs
    return DrawnProblems(section, part=part, key="data.train")


def pixels(picture: bytes) -> tuple[int, int, Any]:
    """Returns width, height and a function of the pixels of a PNG."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    return *image.size, lambda x, y: image.getpixel((x, y))


def test_the_side_is_that_of_the_square() -> None:
    for index in range(len(problems(tasks="side"))):
        prompt = problems(tasks="side")[index]
        wide, high, colour = pixels(prompt.images[0])
        coloured = [x for x in range(wide) for y in range(high) if colour(x, y) != WHITE]
        assert (prompt.answer == "r") == (min(coloured) >= wide // 2) and prompt.response == prompt.answer
        assert prompt.level == "side" and wide == high == 56
        if index == 3:
            break


def test_as_many_squares_as_the_answer_says() -> None:
    source = problems(tasks="count", most=4)
    for index in range(6):
        prompt = source[index]
        wide, high, colour = pixels(prompt.images[0])
        spots = {(x, y) for x in range(wide) for y in range(high) if colour(x, y) != WHITE}
        number = 0
        while spots:  # a connected square is one
            number += 1
            todo = [spots.pop()]
            while todo:
                x, y = todo.pop()
                for near in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                    if near in spots:
                        spots.remove(near)
                        todo.append(near)
        assert str(number) == prompt.answer


def test_the_area_is_that_of_the_unit_squares() -> None:
    source = problems(tasks="area", most=6)
    for index in range(6):
        prompt = source[index]
        wide, high, colour = pixels(prompt.images[0])
        drawn = [(x, y) for x in range(wide) for y in range(high) if colour(x, y) != WHITE]
        unit = wide // 7
        spans = [max(axis) - min(axis) for axis in zip(*drawn, strict=True)]
        assert str(spans[0] // unit * (spans[1] // unit)) == prompt.answer


def test_no_image_is_in_both_parts_whatever_the_seeds() -> None:
    tasks = ["count", "area", "side"]
    trained = {problems(tasks=tasks, seed=seed)[n].images[0] for seed in (1, 2) for n in range(20)}
    evaluated = {problems("eval", tasks=tasks, seed=seed)[n].images[0] for seed in (1, 2) for n in range(20)}
    assert not trained & evaluated
    assert {problems(tasks=tasks)[n].level for n in range(40)} == set(tasks)
    assert [problems(tasks=tasks)[n].id for n in range(9)] == [problems(tasks=tasks)[n].id for n in range(9)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"task": "count"},
            r"data\.train\.kwargs\.task is 'count'; did you mean 'tasks'.*allowed: tasks, most, points",
        ),
        ({"tasks": "dots"}, r"kwargs\.tasks is 'dots'; allowed: count, area, side"),
        ({"tasks": []}, r"kwargs\.tasks is \[\]"),
        ({"most": 10}, r"kwargs\.most is 10; it must lie between 1 and 9"),
        ({"most": "4"}, r"kwargs\.most is '4'"),
        ({"points": 27}, r"kwargs\.points is 27; it must lie between 28 and 1024"),
    ],
)
def test_arguments_are_checked(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problems(**kwargs)
