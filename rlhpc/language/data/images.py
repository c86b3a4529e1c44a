"""Pictures of a row of data: files, data URLs, or bytes as Hugging Face `datasets` and Parquet files have them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.config.typed import select
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.plugins import required
from rlhpc.runtime.text import first_line

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig
    from rlhpc.language.data.prompts import Prompt


#: Where a picture stands in a message's text. Pictures that no message names come before the last question.
MARK = "<image>"
#: Families of models that look at pictures, by `model_type`; in all of them a picture's tokens have three positions each.
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
#: Kinds of agents to which a prompt's conversation is given as it is.
_SHOWN = ("inline", "python", "mcp")
#: Training backends in which all ranks look, whichever of them see something.
_TRAINED = ("local", "fsdp")


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The pictures of one prompt.

    Attributes:
        patches: Of each picture, `[P, d]` float32: what the model looks at. Turns of an episode share those of earlier ones.
        grids: `[M, 3]` int64: frames, rows and columns of each picture's patches.
        at: `[M]` int64: at which of the prompt's tokens the first of each picture stands.
        merge: So many patches in each direction become one token.
        digests: Of each picture: the same for the same one, cut in the same way.
    """

    patches: tuple[np.ndarray, ...]
    grids: np.ndarray
    at: np.ndarray
    merge: int
    digests: tuple[bytes, ...]

    @property
    def places(self) -> tuple[tuple[int, bytes], ...]:
        """Where each stands, and which it is."""
        return tuple(zip(self.at.tolist(), self.digests, strict=True))

    @property
    def tokens(self) -> np.ndarray:
        """`[M]`: tokens of each picture."""
        return np.asarray(self.grids.prod(1) // self.merge**2)

    def positions(self, length: int) -> np.ndarray:
        """`[3, length]`: see `positions`."""
        return positions(length, self.at, self.grids, self.merge)

    def inputs(self, length: int, device: Any) -> dict[str, Any]:
        """A model's further arguments, for one sequence of at most `length` tokens (`Pictures.inputs`)."""
        import torch

        kinds = np.zeros((1, length), np.int64)
        for at, size in zip(self.at.tolist(), self.tokens.tolist(), strict=True):
            kinds[0, at : at + size] = 1
        arrays = {
            "pixel_values": np.concatenate(self.patches),
            "image_grid_thw": self.grids,
            "mm_token_type_ids": kinds,
        }
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def joined(first: PromptImages | None, then: PromptImages | None) -> PromptImages | None:
    """What a text shows, and what is shown behind that, in one."""
    if first is None or then is None:
        return first or then
    arrays = {name: np.concatenate([getattr(first, name), getattr(then, name)]) for name in ("grids", "at")}
    return PromptImages(
        first.patches + then.patches, merge=first.merge, digests=first.digests + then.digests, **arrays
    )  # fmt: skip


def positions(length: int, at: np.ndarray, grids: np.ndarray, merge: int) -> np.ndarray:
    """Where the tokens of a sample are, in time, height and width, as Qwen2-VL counts it (arXiv 2409.12191, section 2.1).

    Those of a text go on by one in all three; a picture's begin where the text before it ended, and what follows it begins
    behind the longest side.

    Args:
        length: Tokens.
        at, grids, merge: See `PromptImages`.

    Returns:
        `[3, length]` int64.
    """
    found = np.empty((3, length), np.int64)
    token = place = 0
    for first, grid in zip(at.tolist(), grids, strict=True):
        found[:, token:first] = np.arange(place, place + first - token)
        place += first - token
        sides = grid // (1, merge, merge)
        token = first + int(sides.prod())
        found[:, first:token] = np.indices(sides).reshape(3, -1) + place
        place += int(max(sides[1:]))
    found[:, token:] = np.arange(place, place + length - token)
    return found


class Looker:
    """Looks at a prompt's pictures as a model does.

    Args:
        cutter: The image processor of transformers that came with the model.
        token: What stands for a part of a picture among the tokens.
        name: Of the model, for messages.
    """

    def __init__(self, cutter: Any, token: int, name: str) -> None:
        self.token, self._name = token, name
        self._merge = int(cutter.merge_size)
        self._cutter = cutter
        self._one = lru_cache(maxsize=16)(self._cut)

    def asked(self, prompt: Prompt) -> list[dict[str, Any]]:
        """A prompt's conversation, with places for its pictures."""
        return placed(prompt.messages, len(prompt.images))

    def widened(self, prompt: Prompt, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids with as many of a picture as it has parts, where its template wrote one, and where each begins."""
        try:
            return self._widened(prompt.images, ids)
        except ConfigError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None

    def seen(self, images: Sequence[bytes], at: Sequence[int]) -> PromptImages:
        """Pictures of which the first tokens stand at these places."""
        patches, grids, digests = zip(*map(self._one, images), strict=True)
        return PromptImages(tuple(patches), np.stack(grids), np.asarray(at, np.int64), self._merge, tuple(digests))

    def look(
        self, images: Sequence[bytes], ids: Sequence[int], behind: int = 0, spoken: Collection[int] = ()
    ) -> tuple[list[int], PromptImages]:
        """Token ids with as many of a picture as it has parts, where a chat template wrote one; and what they show.

        Args:
            images: One or more, in the order in which they stand there.
            ids: As the template has them: one for each picture.
            behind: So many tokens stand before these, which the places of what is seen count in.
            spoken: Which of them are no places of pictures, whatever they look like: somebody has only written so.

        Raises:
            ConfigError: There are more places than pictures, or fewer; or one of them cannot be opened.
        """
        found, at = self._widened(images, ids, spoken)
        return found, self.seen(images, [behind + place for place in at])

    def _widened(
        self, images: Sequence[bytes], ids: Sequence[int], spoken: Collection[int] = ()
    ) -> tuple[list[int], list[int]]:
        places = [n for n, one in enumerate(ids) if one == self.token and n not in spoken]
        if len(places) != len(images):
            raise ConfigError(
                f"there are {len(images)} pictures, and the text has {len(places)} places for them after the chat "
                f"template of {self._name}: write {MARK} once for each, or not at all, and not the template's own sign for one"
            )
        widened, at, before = list[int](), list[int](), 0
        for place, image in zip(places, images, strict=True):
            widened += ids[before:place]
            at.append(len(widened))
            widened += [self.token] * self._tokens(image)
            before = place + 1
        return [*widened, *ids[before:]], at

    def _tokens(self, image: bytes) -> int:
        """Returns how many tokens a picture becomes, of which only the size is read."""
        width, height = size_of(image)
        return int(self._cutter.get_number_of_image_patches(height, width, {})) // self._merge**2

    @property
    def most(self) -> int:
        """Most tokens of a picture: larger ones are made smaller."""
        side = self._cutter.patch_size * self._merge
        return max(1, int(self._cutter.size["longest_edge"]) // side**2)

    def blank(self, tokens: int) -> PromptImages:
        """A picture of so many tokens, all grey, which stands alone."""
        grids = np.asarray([[1, self._merge, self._merge * tokens]], np.int64)
        width = 3 * self._cutter.temporal_patch_size * self._cutter.patch_size**2
        patches = np.zeros((int(grids.prod()), width), np.float32)
        return PromptImages((patches,), grids, np.zeros(1, np.int64), self._merge, (b"",))

    def _cut(self, image: bytes) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Patches, grid and digest of a picture."""
        made = self._cutter(images=[opened(image)], return_tensors="np")
        patches = np.ascontiguousarray(made["pixel_values"], np.float32)
        grid = np.asarray(made["image_grid_thw"][0], np.int64)
        found = hashlib.blake2b(grid.tobytes(), digest_size=16)
        found.update(patches.data)
        return patches, grid, found.digest()


def opened(image: bytes) -> Any:
    """A picture in PIL's form.

    Raises:
        ConfigError: It is none, or PIL is missing.
    """
    return _by_pil(image, lambda found: found.convert("RGB"))


def size_of(image: bytes) -> tuple[int, int]:
    """Width and height of a picture, of which no more is read than says that.

    Raises:
        ConfigError: It is none, or PIL is missing.
    """
    size: tuple[int, int] = _by_pil(image, lambda found: found.size)
    return size


def _by_pil(image: bytes, what: Callable[[Any], Any]) -> Any:
    pillow = required("PIL.Image", "pictures need Pillow")
    try:
        return what(pillow.open(io.BytesIO(image)))
    except (OSError, ValueError, pillow.DecompressionBombError, SyntaxError) as error:  # as its formats' readers raise
        raise ConfigError(f"a picture of {len(image)} bytes is none: {error}") from None


def looks(config: Any) -> bool:
    """Whether a model of this configuration has a part that looks at pictures."""
    return getattr(config, "vision_config", None) is not None


def make_looker(path: str, trust_remote_code: bool = False, *, key: str = "actor.model.model_path") -> Looker:
    """What looks at pictures for the model of a folder or hub name.

    Raises:
        ConfigError: The model reads text alone, is of another family, or came without an image processor.
    """
    from rlhpc.language.hugging_face import load_model_config

    config = load_model_config(path, trust_remote_code)
    if not looks(config):
        raise ConfigError(
            f"data: prompts have pictures, and the model in {path} ({key}), a {config.model_type}, reads text alone: take a "
            f"model that looks at pictures ({', '.join(FAMILIES)}), or data without"
        )
    require_family(config, path, key)
    from transformers import AutoImageProcessor

    try:
        cutter = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"the model in {path} ({key}) looks at pictures, and has no image processor that can be loaded "
            f"({first_line(error)}): put the preprocessor_config.json that came with it beside config.json"
        ) from None
    return Looker(cutter, int(config.image_token_id), path)


def require_family(config: Any, path: str, key: str) -> None:
    """Refuses models whose pictures are placed in ways that are not known here."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"{key} is {path}, a {config.model_type}, which looks at pictures in a way that is not known here; allowed: "
            f"{', '.join(FAMILIES)}, and models of text"
        )


def parts_of(message: dict[str, str]) -> dict[str, Any]:
    """A message as chat templates take it where there are pictures: texts, and places of pictures."""
    texts = message["content"].split(MARK)
    parts = list[dict[str, str]]()
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}


def placed(messages: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """A conversation with places for pictures: where it says `MARK`, or, if it does so nowhere, before the last question."""
    found = [dict(message) for message in messages]
    if not any(MARK in message["content"] for message in found):
        asked = next((m for m in reversed(found) if m["role"] == "user"), found[-1])
        asked["content"] = MARK * count + asked["content"]
    return [parts_of(message) for message in found]


def check_looking(cfg: LanguageConfig, config: Any, shows: bool) -> None:
    """Refuses what a model that looks at pictures is not trained with.

    Args:
        cfg: Of a run.
        config: The model's.
        shows: Whether prompts show pictures.

    Raises:
        ConfigError: Names the key.
    """
    path, actor, lora = str(cfg.actor.model.model_path), cfg.actor, cfg.actor.lora
    if shows and cfg.agent.kind not in _SHOWN:
        raise ConfigError(
            f"agent.kind is {cfg.agent.kind}, which asks the model with texts of its own, and prompts of data.train show "
            f"pictures; allowed: {', '.join(_SHOWN)}"
        )
    if not looks(config):
        return
    require_family(config, path, "actor.model.model_path")
    if str(select(cfg, "rollout.weight_sync")).lower() == "shards":
        raise ConfigError(f"rollout.weight_sync is 'shards', and the model in {path} looks at pictures; allowed: auto")
    if actor.training_backend.lower() not in _TRAINED:
        raise ConfigError(
            f"actor.training_backend is {actor.training_backend!r}, and the model in {path} looks at pictures: ranks that see "
            f"none in a micro-batch would not take part in gathering what looks at them; allowed: {', '.join(_TRAINED)}"
        )
    if cut := next((name for name in ("context", "tensor", "expert") if getattr(actor.parallel, name) > 1), ""):
        raise ConfigError(
            f"actor.parallel.{cut} is {getattr(actor.parallel, cut)}, and the model in {path} looks at pictures, which is "
            "divided by shard and replicate alone; allowed: 1"
        )
    if shows and select(cfg, "teacher.rollout_backend"):
        raise ConfigError(
            "teacher.rollout_backend is 'vllm', and prompts of data.train show pictures, which a teacher in vLLM is not "
            "shown; allowed: null"
        )
    if lora.rank and select(cfg, "rollout.merge_adapters") is False:
        raise ConfigError(
            f"rollout.merge_adapters is false, and the model in {path} looks at pictures: vLLM would leave out adapters "
            "of what looks at them; allowed: true"
        )
    if actor.model.freeze_vision and lora.rank:
        raise ConfigError(
            f"actor.model.freeze_vision is true and actor.lora.rank is {lora.rank}: adapters leave all else as it is; "
            "say with actor.lora.target_modules which layers get some"
        )


_URL = "data:image/"
_FORMS = "a file's path, a data URL (data:image/png;base64,…), {bytes: …}, or a list of these"


def read_images(value: Any, folder: Path) -> tuple[bytes, ...]:
    """The pictures of a row, as files have them.

    Args:
        value: What stands in its column; None for none.
        folder: Where relative paths begin.

    Raises:
        ConfigError: It is something else, or a file cannot be read.
    """
    return tuple(_bytes(one, folder) for one in _several(value))


def check_images(value: Any, folder: Path) -> None:
    """Refuses what `read_images` would: files are only looked for, and of bytes it is read how large the picture is.

    Raises:
        ConfigError: See there.
    """
    for one in _several(value):
        if not isinstance(one, str) or one.startswith(_URL):
            size_of(_bytes(one, folder))
        elif not _path(one, folder).is_file():
            raise ConfigError(f"there is no file {_path(one, folder)}")


def names_of(value: Any) -> str:
    """Which pictures a row has, as far as that is known without opening files: paths as they stand, of others a digest."""
    named = [
        one if isinstance(one, str) and not one.startswith(_URL) else _bytes(one, Path()) for one in _several(value)
    ]
    return repr([one if isinstance(one, str) else digest_of(one) for one in named])


def digest_of(image: bytes) -> str:
    """The same for the same file."""
    return hashlib.blake2b(image, digest_size=16).hexdigest()


def _several(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else (value,)


def _bytes(one: Any, folder: Path) -> bytes:
    if isinstance(one, Mapping):
        inside = one.get("bytes")
        one = inside if inside is not None else one.get("path")
    if isinstance(one, bytes):
        return one
    if hasattr(one, "save"):  # datasets opens them itself
        return _png(one)
    if not isinstance(one, str) or not one:
        raise ConfigError(f"a picture is {type(one).__name__}; allowed: {_FORMS}")
    if one.startswith(_URL):
        return from_url(one)
    try:
        return _path(one, folder).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_path(one, folder)} cannot be read: {error.strerror}") from None


def from_url(url: str) -> bytes:
    """The picture in a data URL.

    Raises:
        ConfigError: It is none.
    """
    head, _, body = url.partition(",")
    if not head.startswith(_URL) or not head.endswith(";base64"):
        raise ConfigError(f"a picture is the URL {url[:40]!r}; allowed: data:image/png;base64,… and its like")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"a picture's data URL is not base64: {error}") from None


def _png(image: Any) -> bytes:
    import io

    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()


def _path(one: str, folder: Path) -> Path:
    path = expand_home(one)
    return path if path.is_absolute() else folder / path
