"""Observations: an array `[N, ...]`, or a dict of such arrays for several modalities.

A simulator on an accelerator returns tensors instead of arrays if `VectorEnv.on_device` is set.

Messages between workers contain an array as the column `obs`, and a dict as columns `obs.<key>`. Texts are zero-padded
UTF-8, uint8 `[N, bytes]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rlhpc.runtime.errors import ConfigError


def is_tensor(array: Any) -> bool:
    """Returns whether an array of an observation is a torch tensor."""
    return hasattr(array, "is_floating_point")


def is_finite(array: Any) -> bool:
    """Returns whether all numbers of an array are finite, in one pass without a temporary array. Integers are always
    finite.
    """
    if is_tensor(array):
        return not array.is_floating_point() or bool(array.isfinite().all())
    if array.dtype.kind != "f":
        return True
    flat_array = array.reshape(-1)
    # The sum of squares may overflow although all numbers are finite. Each number is checked only in that case.
    return math.isfinite(np.vdot(flat_array, flat_array)) or bool(np.isfinite(array).all())


def bad_rows(array: Any, lead: int = 1) -> np.ndarray:
    """Returns a bool mask of the rows with a non-finite number; its shape is the first `lead` axes of the array."""
    if is_tensor(array):
        bad_elements = ~array.isfinite()
        if bad_elements.ndim > lead:
            bad_elements = bad_elements.flatten(lead).any(-1)
        is_nonfinite_on_host: np.ndarray = bad_elements.cpu().numpy()
        return is_nonfinite_on_host
    if array.dtype.kind != "f":
        return np.zeros(array.shape[:lead], bool)
    is_finite_element = np.isfinite(array)
    is_nonfinite: np.ndarray = ~is_finite_element.all(tuple(range(lead, array.ndim)))
    return is_nonfinite


def replace_nonfinite(obs: Any) -> Any:
    """Returns an observation (or another array) with 0 in place of non-finite numbers."""
    if isinstance(obs, dict):
        return {key: replace_nonfinite(array) for key, array in obs.items()}
    if is_finite(obs):
        return obs
    return obs.where(obs.isfinite(), 0) if is_tensor(obs) else np.where(np.isfinite(obs), obs, obs.dtype.type(0))


def all_finite(obs: Any) -> bool:
    """Returns whether all numbers of an observation are finite."""
    return all(map(is_finite, obs.values())) if isinstance(obs, dict) else is_finite(obs)


def bad_slots(obs: Any) -> np.ndarray:
    """Returns a mask (bool `[N]`) of the slots with a non-finite number."""
    arrays = obs.values() if isinstance(obs, dict) else (obs,)
    is_nonfinite: np.ndarray = np.logical_or.reduce([bad_rows(array) for array in arrays])
    return is_nonfinite


Obs = np.ndarray | dict[str, np.ndarray]

#: Size in bytes of an encoded text whose space has no maximum length.
TEXT_BYTES = 128


def columns_of(name: str, obs: Any) -> dict[str, Any]:
    """Returns an observation as named columns; inverse of `rows_of`."""
    return {f"{name}.{key}": array for key, array in obs.items()} if isinstance(obs, dict) else {name: obs}


def rows_of(columns: Mapping[str, Any], name: str) -> Any:
    """Returns the observation from its columns, which are arrays or tensors; inverse of `columns_of`."""
    if name in columns:
        return columns[name]
    return {key[len(name) + 1 :]: column for key, column in columns.items() if key.startswith(f"{name}.")}


def is_column(column: str, name: str) -> bool:
    """Returns whether a column belongs to the observation `name`."""
    return column == name or column.startswith(f"{name}.")


def take(obs: Any, index: Any) -> Any:
    """Returns rows of an observation, by slice, mask or indices."""
    return {key: array[index] for key, array in obs.items()} if isinstance(obs, dict) else obs[index]


def join(observations: Sequence[Any]) -> Any:
    """Concatenates observations along their first axis."""
    if len(observations) == 1:
        return observations[0]
    if isinstance(observations[0], dict):
        return {key: join([obs[key] for obs in observations]) for key in observations[0]}
    tensors = [obs for obs in observations if is_tensor(obs)]
    if not tensors:
        return np.concatenate(observations)
    import torch

    return torch.cat([torch.as_tensor(obs, device=tensors[0].device) for obs in observations])


def as_arrays(obs: Any) -> Obs:
    """Converts an environment's observation to arrays in host memory."""
    if isinstance(obs, dict):
        return {key: np.asarray(as_arrays(array)) for key, array in obs.items()}
    return obs.cpu().numpy() if is_tensor(obs) else np.asarray(obs)


def keep_tensors(obs: Any) -> Any:
    """Converts an environment's observation to arrays; tensors stay tensors."""
    if isinstance(obs, dict):
        return {key: keep_tensors(array) for key, array in obs.items()}
    return obs if is_tensor(obs) else np.asarray(obs)


def count_rows(obs: Any) -> int:
    """Returns the number of slots of an observation, of arrays or tensors."""
    return len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)


def boxes_of(space: Any) -> dict[str, Any]:
    """Returns the spaces of an observation by key; the key of an array's space is the empty string."""
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}


def row_bytes(space: Any) -> dict[str, int]:
    """Returns the size in bytes of one slot's observation, by key."""
    return {key: math.prod(box.shape) * np.dtype(box.dtype).itemsize for key, box in boxes_of(space).items()}


def zero_obs(space: Any, count: int) -> Obs:
    """Returns an observation of `count` slots, all zeros."""
    rows: dict[str, Any] = {key: np.zeros((count, *box.shape), box.dtype) for key, box in boxes_of(space).items()}
    obs: Obs = rows.get("", rows)
    return obs


#: Orders of a rendered image's rows and columns, by `kwargs.image_orientation`.
_ORDERS: dict[str, tuple[slice, ...]] = {
    "rotate_180": (slice(None, None, -1), slice(None, None, -1)),
    "flip_rows": (slice(None, None, -1),),
    "raw": (),
}


def orient(picture: np.ndarray, orientation: str) -> np.ndarray:
    """Returns an image `[H, W, C]` of a MuJoCo renderer in the orientation that policies expect.

    Policies released for LIBERO and MetaWorld were trained with `rotate_180` (OpenVLA, openpi, LeRobot and RLinf all
    rotate). `flip_rows` turns the image upright, and `raw` leaves it unchanged.
    """
    return np.ascontiguousarray(picture[_ORDERS[orientation]])


def encode_text(text: str, size: int) -> np.ndarray:
    """Returns a text as zero-padded UTF-8, uint8 `[size]`.

    Raises:
        ConfigError: The text has more bytes. It is not truncated, because a truncated instruction could mean something
            else.
    """
    encoded_text = text.encode()
    if len(encoded_text) > size:
        raise ConfigError(
            f"the text {text[:80]!r} has {len(encoded_text)} bytes, and the observation has room for {size}"
        )
    row = np.zeros(size, np.uint8)
    row[: len(encoded_text)] = np.frombuffer(encoded_text, np.uint8)
    return row


def decode_text(row: Any) -> str:
    """Returns the text of a row from `encode_text`."""
    return bytes(row).rstrip(b"\0").decode()


def is_text(space: Any) -> bool:
    """Returns whether a space's elements are texts: `Text`, and spaces such as minigrid's missions."""
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def text_bytes(texts: Iterable[str]) -> int:
    """Returns the number of UTF-8 bytes of the longest text, at least `TEXT_BYTES`."""
    return max([TEXT_BYTES, *(len(instruction.encode()) for instruction in texts)])


def text_space(space: Any) -> spaces.Box:
    """Returns the space of an encoded text. A text space limits the number of characters; a character takes up to four
    bytes.
    """
    length = getattr(space, "max_length", None)
    max_character_bytes = max((len(character.encode()) for character in getattr(space, "character_set", ())), default=4)
    return spaces.Box(0, 255, (TEXT_BYTES if length is None else int(length) * max_character_bytes,), np.uint8)


def is_channel_last(shape: Sequence[int]) -> bool:
    """Returns whether an image's last axis holds the channels. If the image is square, its channels are the axis with
    another length. Otherwise, the shorter one of the first and the last axis holds the channels.
    """
    dim_0, dim_1, dim_2 = shape
    if (dim_0 == dim_1) != (dim_1 == dim_2):
        return dim_0 == dim_1
    return dim_2 <= dim_0


def _to_number_list(array: np.ndarray) -> Any:
    """Returns a list of the numbers, or a single number if all are equal. JSON has no infinity, so the result contains
    the word `inf` or `-inf` instead, which numpy reads.
    """
    numbers = [float(x) if np.isfinite(x) else str(float(x)) for x in array.reshape(-1)]
    return numbers[0] if numbers and all(x == numbers[0] for x in numbers) else numbers


def require_bounded(space: Any) -> None:
    """Checks that an action space is a bounded Box, which off-policy critics need.

    Raises:
        ConfigError: The action space is not a Box, or has no bounds.
    """
    if not isinstance(space, spaces.Box) or not space.is_bounded():
        raise ConfigError(
            f"off-policy learning needs bounded continuous actions (Box); the environment's are {space}: take another "
            "env.train.env_id, or runner.task_type=embodied (PPO)"
        )


def space_to_json(space: Any) -> dict[str, Any]:
    """Describes a Box, Discrete, MultiDiscrete or MultiBinary space, or a Dict of such spaces, as JSON.

    Raises:
        ConfigError: The space is of an unsupported type.
    """
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {key: space_to_json(subspace) for key, subspace in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        return {
            "type": "Box",
            "shape": list(space.shape),
            "dtype": str(space.dtype),
            "low": _to_number_list(space.low),
            "high": _to_number_list(space.high),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": int(np.prod(space.shape))}
    raise ConfigError(
        f"space {space} is not supported; supported: Box, Discrete, MultiDiscrete, MultiBinary, Dict. Wrap the environment "
        f"(env.train.wrappers), for example with gymnasium.wrappers:FlattenObservation"
    )


def space_from_json(data: dict[str, Any]) -> Any:
    """Builds the space that `space_to_json` described."""
    space_type = data["type"]
    if space_type == "Dict":
        return spaces.Dict({key: space_from_json(subspace) for key, subspace in data["spaces"].items()})
    if space_type == "Box":
        dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
        low, high = (
            np.broadcast_to(np.asarray(data[k], np.float64).reshape(-1), (int(np.prod(shape)),))
            if np.size(data[k]) == 1
            else np.asarray(data[k], np.float64)
            for k in ("low", "high")
        )
        return spaces.Box(low.reshape(shape).astype(dtype), high.reshape(shape).astype(dtype), dtype=dtype.type)
    if space_type == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if space_type == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(data["nvec"]), start=np.array(data["start"]) if "start" in data else None)
    return spaces.MultiBinary(data["n"])
