"""Options of components (`kwargs`): names, types and ranges come from the component's declaration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from omegaconf import OmegaConf

from rlhpc.config.options import check_options, read_options
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import former_keywords
from rlhpc.runtime.key_metadata import POSITIVE, Choices, Range


@dataclass(frozen=True)
class FlowOptions:
    steps: Annotated[int, Range(1)] = 4
    noise: Annotated[float | None, POSITIVE] = 0.5
    encoder: Annotated[str, Choices("cnn", "resnet")] = "cnn"
    digits: Annotated[int | list[int], Range(1, 9)] = 2
    names: list[str] | None = None
    is_cropped: bool = False

    def __post_init__(self) -> None:
        if self.names == ["none"]:
            raise ValueError("names is ['none']; it must name one")


class Reward:
    def __init__(self, weight: float, words: Sequence[str] = (), mode: Literal["a", "b"] = "a") -> None:
        self.weight = weight


class OpenReward:
    def __init__(self, weight: float = 1.0, **others: Any) -> None:
        self.others = others


def judge(sample: object, *, at_least: int = 0, label: str = "") -> float:
    return 0.0


@former_keywords(least="at_least")
def renamed(*, at_least: Annotated[int, Range(0)] = 0) -> int:
    return at_least


ACCEPTED: list[tuple[Callable[..., Any], int, dict[str, Any]]] = [
    (FlowOptions, 0, {}),
    (FlowOptions, 0, {"steps": 1, "noise": 2, "encoder": "resnet", "digits": [1, 9], "names": ["x"], "is_cropped": True}),
    (FlowOptions, 0, {"noise": None, "names": None, "digits": 9}),
    (Reward, 0, {"weight": 1, "words": ["x", "y"], "mode": "b"}),
    (OpenReward, 0, {"anything": object}),
    (judge, 1, {"at_least": 3, "label": "x"}),
    (dict, 0, {}),
]  # fmt: skip
REFUSED: list[tuple[Callable[..., Any], int, dict[str, Any], str]] = [
    (
        FlowOptions,
        0,
        {"step": 1},
        r"k\.step is 1; did you mean 'steps'\? the flow has no such option; allowed: steps, noise",
    ),
    (FlowOptions, 0, {"steps": 0}, r"k\.steps is 0; it must be at least 1"),
    (FlowOptions, 0, {"steps": True}, r"k\.steps is True; it must be int"),
    (FlowOptions, 0, {"steps": 2.5}, r"k\.steps is 2.5; it must be int"),
    (FlowOptions, 0, {"noise": float("nan")}, r"k\.noise is nan; it must be greater than 0"),
    (FlowOptions, 0, {"noise": float("inf")}, r"k\.noise is inf; it must be greater than 0"),
    (FlowOptions, 0, {"noise": "much"}, r"k\.noise is 'much'; it must be float or null"),
    (FlowOptions, 0, {"encoder": "resnit"}, r"k\.encoder is 'resnit'; did you mean 'resnet'\? allowed: cnn, resnet"),
    (FlowOptions, 0, {"digits": [1, 10]}, r"k\.digits is \[1, 10\]; it must lie between 1 and 9"),
    (FlowOptions, 0, {"digits": []}, r"k\.digits is \[\]; it must not be empty"),
    (FlowOptions, 0, {"names": [1]}, r"k\.names is \[1\]; it must be a list of str or null"),
    (FlowOptions, 0, {"is_cropped": 1}, r"k\.is_cropped is 1; it must be bool"),
    (Reward, 0, {}, r"k\.weight is not set; the flow needs it; allowed: weight, words, mode"),
    (Reward, 0, {"weight": 1, "mode": "c"}, r"k\.mode is 'c'; it must be "),
    (judge, 1, {"sample": 1}, r"k\.sample is 1; the flow has no such option; allowed: at_least, label"),
]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("depth", "'depth' is an option of tree, forest; "),  # of other components
        ("dpeth", "did you mean 'depth'? 'depth' is an option of tree, forest; "),
        ("stesp", "did you mean 'steps'? "),
        ("zzzz", ""),
    ],
)
def test_an_option_of_other_components_is_named_as_theirs(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options(
            FlowOptions,
            {name: 1},
            "k",
            "the flow",
            list_other_options=lambda: {
                "tree": ["depth"],
                "forest": ["depth", "num_trees"],
                "flow": ["steps", "noise"],
            },
        )
    assert str(refused.value).startswith(f"k.{name} is 1; {hint}the flow has no such option; ")


@pytest.mark.parametrize(("options_type", "positional", "values"), ACCEPTED)
def test_declared_options_are_accepted(
    options_type: Callable[..., Any], positional: int, values: dict[str, Any]
) -> None:
    assert check_options(options_type, values, "k", "the flow", positional) == values


@pytest.mark.parametrize(("options_type", "positional", "values", "message"), REFUSED)
def test_other_options_are_refused(
    options_type: Callable[..., Any], positional: int, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as raised:
        check_options(options_type, values, "k", "the flow", positional)
    assert "\n" not in str(raised.value)


def test_the_case_of_a_choice_does_not_matter() -> None:
    """As in sections: the component gets the word in lower case, and other texts as they are."""
    assert read_options(FlowOptions, {"encoder": "ResNet", "names": ["A"]}, "k", "the flow") == FlowOptions(
        encoder="resnet", names=["A"]
    )


def test_options_become_the_dataclass() -> None:
    options = read_options(FlowOptions, OmegaConf.create({"digits": [1, 2]}), "k", "the flow")
    assert options == FlowOptions(digits=[1, 2]) and type(options.digits) is list
    with pytest.raises(ConfigError, match=r"^k\.names is \['none'\]; it must name one$"):
        read_options(FlowOptions, {"names": ["none"]}, "k", "the flow")
    with pytest.raises(ConfigError, match=r"^k is \['steps'\]; write a mapping of options$"):
        read_options(FlowOptions, ["steps"], "k", "the flow")


def test_former_names_are_todays() -> None:
    assert check_options(renamed, {"least": 2}, "k", "it") == {"at_least": 2}
    with pytest.raises(ConfigError, match=r"^k\.at_least is -1; it must not be negative$"):
        check_options(renamed, {"least": -1}, "k", "it")
