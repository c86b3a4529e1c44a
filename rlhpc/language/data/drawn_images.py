"""Procedural image problems: drawn shapes with questions about their number, area or side."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rlhpc.config.options import as_list, read_options
from rlhpc.language.data.procedural import choose_contents, locate
from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.key_metadata import Choices, Range
from rlhpc.runtime.plugins import require_package

if TYPE_CHECKING:
    from rlhpc.language.config.data import DataSourceConfig

_COLOURS = {"red": (220, 40, 40), "green": (40, 170, 70), "blue": (50, 80, 220)}
#: Number of drawings per task and answer; some drawings may be equal.
_NUM_DRAWINGS = 1 << 12
#: Corners, fill colour, and border colour of a rectangle.
Box = tuple[tuple[int, int, int, int], tuple[int, int, int], tuple[int, int, int] | None]


@dataclass(frozen=True)
class DrawnOptions:
    """Options of source `drawn`."""

    tasks: Annotated[str | list[str], Choices("count", "area", "side")] = "count"
    """A task or a list of tasks (see `DrawnProblems`)."""
    most: Annotated[int, Range(1, 9)] = 4
    """Largest answer."""
    points: Annotated[int, Range(28, 1024)] = 56
    """Width and height of the image in pixels."""


class DrawnProblems:
    """Questions about drawn images, which the number of a problem determines. No image occurs twice or in both parts.

    - `count`: squares on a grid; the answer is their number.
    - `area`: a rectangle of unit squares with borders; the answer is its area.
    - `side`: a square on the left or on the right; the answer is `l` or `r`.

    A hash of the drawing decides its part: `eval_fraction` of all images, or a fifth if that is 0, belong to evaluation.
    Task `count` has 585 images with `most` 4 and `points` 56; the other tasks have many more.

    Args:
        cfg: Section `data.train` or `data.eval[i]`; `kwargs` are `DrawnOptions`.
        part: "train" or "eval".
        key: Name of the section in messages.

    Raises:
        ConfigError: `kwargs` are invalid, Pillow is missing, or `size` exceeds the number of problems.
    """

    def __init__(self, cfg: DataSourceConfig, *, part: str, key: str) -> None:
        options = read_options(DrawnOptions, cfg.kwargs, f"{key}.kwargs", "source drawn")
        require_package("PIL", f"{key}: source drawn needs Pillow")
        self._tasks, self._max_answer, self._points = as_list(options.tasks), options.most, options.points
        self._answers = [_answers(task, self._max_answer) for task in self._tasks]
        self._sizes = [len(answers) * _NUM_DRAWINGS for answers in self._answers]
        self._numbers = choose_contents(cfg, self._sizes, self._content, part=part, key=key)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        problem_number = self._numbers[index]
        task, answer, question, boxes = self._draw_scene(problem_number)
        return Prompt(
            id=problem_number,
            messages=({"role": "user", "content": question},),
            answer=answer,
            response=answer,
            level=task,
            images=(_draw_png(self._points, boxes),),
        )

    def _draw_scene(self, problem_number: int) -> tuple[str, str, str, list[Box]]:
        """Returns a problem's task, answer and question, and the rectangles of its image."""
        level_index, number_in_level = locate(problem_number, self._sizes)
        task, picture_number = self._tasks[level_index], number_in_level // len(self._answers[level_index])
        answer = self._answers[level_index][number_in_level % len(self._answers[level_index])]
        rng = random.Random(f"{task} {self._max_answer} {number_in_level} {picture_number}")
        return task, answer, *_SCENES[task](rng, answer, self._max_answer, self._points)

    def _content(self, number: int) -> str:
        _, _, question, boxes = self._draw_scene(number)
        return f"{question} {self._points} {sorted(boxes, key=repr)}"


def _count_scene(rng: random.Random, answer: str, max_answer: int, num_points: int) -> tuple[str, list[Box]]:
    cells_per_row = max(2, int(max_answer**0.5 + 0.999))
    cell_size = num_points // cells_per_row
    shape_size, color = rng.randint(cell_size // 2, cell_size - 2), rng.choice(sorted(_COLOURS))
    boxes = []
    for cell_number in rng.sample(range(cells_per_row * cells_per_row), int(answer)):
        x, y = (
            cell_number % cells_per_row * cell_size + (cell_size - shape_size) // 2,
            cell_number // cells_per_row * cell_size + (cell_size - shape_size) // 2,
        )
        boxes.append((x, y, x + shape_size - 1, y + shape_size - 1))
    return "how many=", [(box, _COLOURS[color], None) for box in boxes]


def _draw_area_scene(rng: random.Random, answer: str, max_answer: int, num_points: int) -> tuple[str, list[Box]]:
    area = int(answer)
    num_columns = rng.choice([n for n in range(1, area + 1) if area % n == 0])
    num_rows, square_size = area // num_columns, num_points // (max_answer + 1)
    x, y = (rng.randint(0, num_points - 1 - n * square_size) for n in (num_columns, num_rows))
    color = _COLOURS[rng.choice(sorted(_COLOURS))]
    square_boxes: list[Box] = [
        (
            (x + i * square_size, y + j * square_size, x + (i + 1) * square_size, y + (j + 1) * square_size),
            color,
            (0, 0, 0),
        )
        for i in range(num_columns)
        for j in range(num_rows)
    ]
    return "area=", square_boxes


def _draw_side_scene(rng: random.Random, answer: str, max_answer: int, num_points: int) -> tuple[str, list[Box]]:
    del max_answer
    half_size = num_points // 2
    shape_size = rng.randint(half_size // 3, half_size - 2)
    x = rng.randint(0, half_size - shape_size) + (half_size if answer == "r" else 0)
    y = rng.randint(0, num_points - shape_size)
    color = _COLOURS[rng.choice(sorted(_COLOURS))]
    return "which side=", [((x, y, x + shape_size - 1, y + shape_size - 1), color, None)]


_SCENES: dict[str, Callable[[random.Random, str, int, int], tuple[str, list[Box]]]] = {
    "count": _count_scene,
    "area": _draw_area_scene,
    "side": _draw_side_scene,
}


def _draw_png(num_points: int, boxes: list[Box]) -> bytes:
    """Draws rectangles on a white image; returns the contents of a PNG file."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (num_points, num_points), (255, 255, 255))
    canvas = ImageDraw.Draw(image)
    for box, color, border_color in boxes:
        canvas.rectangle(box, fill=color, outline=border_color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _answers(task: str, max_answer: int) -> list[str]:
    if task == "side":
        return ["l", "r"]
    return [str(n) for n in range(1, max_answer + 1)]
