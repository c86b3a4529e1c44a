"""Images of prompts: reading of files, data URLs and bytes, image processing, and positions of image tokens."""

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
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.text import first_line

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig
    from rlhpc.language.data.prompts import Prompt


#: Placeholder of an image in a message's text. Without placeholders, images come before the last user message.
MARK = "<image>"
#: Supported families of vision-language models, by `model_type`; each token has three positions (M-RoPE).
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
#: Agent types that pass a prompt's conversation to the model unchanged.
_IMAGE_AGENT_KINDS = ("inline", "python", "mcp")
#: Training backends in which every rank runs the vision tower, even in micro-batches without images.
_BACKENDS = ("local", "fsdp")


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of one prompt.

    Attributes:
        patches: Patches of each image, `[P, d]` float32, the model's input. Later turns of an episode share the arrays of
            earlier turns.
        grids: `[M, 3]` int64, number of frames, rows and columns of each image's patches.
        at: `[M]` int64, position of each image's first token in the prompt.
        merge: Number of patches in each direction that form one token.
        digests: Digest of each image; equal patches have equal digests.
    """

    patches: tuple[np.ndarray, ...]
    grids: np.ndarray
    at: np.ndarray
    merge: int
    digests: tuple[bytes, ...]

    @property
    def places(self) -> tuple[tuple[int, bytes], ...]:
        """Position and digest of each image."""
        return tuple(zip(self.at.tolist(), self.digests, strict=True))

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens of each image, `[M]`."""
        return np.asarray(self.grids.prod(1) // self.merge**2)

    def positions(self, length: int) -> np.ndarray:
        """Returns the positions of a prompt's tokens, `[3, length]`; see the function `positions`."""
        return positions(length, self.at, self.grids, self.merge)

    def inputs(self, length: int, device: Any) -> dict[str, Any]:
        """Returns the image arguments of the model's forward pass for one sequence of `length` tokens."""
        import torch

        token_types = np.zeros((1, length), np.int64)
        for image_start, num_tokens in zip(self.at.tolist(), self.tokens.tolist(), strict=True):
            token_types[0, image_start : image_start + num_tokens] = 1
        arrays = {
            "pixel_values": np.concatenate(self.patches),
            "image_grid_thw": self.grids,
            "mm_token_type_ids": token_types,
        }
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def concatenate_images(first_images: PromptImages | None, latter: PromptImages | None) -> PromptImages | None:
    """Concatenates the images of two consecutive parts of a prompt."""
    if first_images is None or latter is None:
        return first_images or latter
    arrays = {
        second_images: np.concatenate([getattr(first_images, second_images), getattr(latter, second_images)])
        for second_images in ("grids", "at")
    }
    return PromptImages(
        first_images.patches + latter.patches,
        merge=first_images.merge,
        digests=first_images.digests + latter.digests,
        **arrays,
    )


def positions(num_tokens: int, first_positions: np.ndarray, grids: np.ndarray, merge: int) -> np.ndarray:
    """Computes the M-RoPE positions of a sample's tokens: time, height and width (Qwen2-VL, arXiv 2409.12191, section 2.1).

    In text all three increase by one per token. An image's positions begin after the preceding text; the following text
    begins after the image's longest side.

    Args:
        num_tokens: Number of tokens.
        first_positions, grids, merge: See `PromptImages`.

    Returns:
        `[3, length]` int64.
    """
    position_ids = np.empty((3, num_tokens), np.int64)
    token = next_position = 0
    for image_start, grid in zip(first_positions.tolist(), grids, strict=True):
        position_ids[:, token:image_start] = np.arange(next_position, next_position + image_start - token)
        next_position += image_start - token
        merged_grid = grid // (1, merge, merge)
        token = image_start + int(merged_grid.prod())
        position_ids[:, image_start:token] = np.indices(merged_grid).reshape(3, -1) + next_position
        next_position += int(max(merged_grid[1:]))
    position_ids[:, token:] = np.arange(next_position, next_position + num_tokens - token)
    return position_ids


class PromptImageProcessor:
    """Image processor for a model's prompts.

    Args:
        processor: The model's image processor from transformers.
        token: Id of the model's image token.
        name: Name of the model, for messages.
    """

    def __init__(self, processor: Any, token: int, name: str) -> None:
        self.token = token
        self._name = name
        self._merge = int(processor.merge_size)
        self._processor = processor
        self._process_cached = lru_cache(maxsize=16)(self._process)

    def conversation(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Returns a prompt's conversation, with placeholders for its images."""
        return insert_image_parts(prompt.messages, len(prompt.images))

    def expand_image_tokens(self, prompt: Prompt, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Repeats each image token as often as its image has tokens; returns the ids and each image's first position.

        Raises:
            ConfigError: The images do not fit the prompt.
        """
        try:
            return self._expand_image_tokens(prompt.images, ids)
        except ConfigError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None

    def prompt_images(self, images: Sequence[bytes], first_positions: Sequence[int]) -> PromptImages:
        """Processes images to patches; `first_positions` holds the position of each image's first token."""
        patches, grids, image_digests = zip(*map(self._process_cached, images), strict=True)
        return PromptImages(
            tuple(patches), np.stack(grids), np.asarray(first_positions, np.int64), self._merge, tuple(image_digests)
        )

    def process_prompt(
        self, images: Sequence[bytes], ids: Sequence[int], offset: int = 0, literal_tokens: Collection[int] = ()
    ) -> tuple[list[int], PromptImages]:
        """Repeats each image token as often as its image has tokens; returns the ids and the processed images.

        Args:
            images: One or more images, in the order of their image tokens.
            ids: Token ids from the chat template, with one image token per image.
            offset: Number of tokens before `ids`, which is added to the images' positions.
            literal_tokens: Indices of image tokens in `ids` without an image: the model or a user wrote them as text.

        Raises:
            ConfigError: The numbers of image tokens and images differ, or an image cannot be opened.
        """
        expanded_ids, image_starts = self._expand_image_tokens(images, ids, literal_tokens)
        return expanded_ids, self.prompt_images(images, [offset + image_start for image_start in image_starts])

    def _expand_image_tokens(
        self, images: Sequence[bytes], ids: Sequence[int], literal_tokens: Collection[int] = ()
    ) -> tuple[list[int], list[int]]:
        token_positions = [n for n, token_id in enumerate(ids) if token_id == self.token and n not in literal_tokens]
        if len(token_positions) != len(images):
            raise ConfigError(
                f"there are {len(images)} pictures, and the text has {len(token_positions)} places for them after the chat "
                f"template of {self._name}: write {MARK} once for each, or not at all, and not the template's own sign for one"
            )
        expanded_ids, image_starts, copied_until = list[int](), list[int](), 0
        for token_position, image in zip(token_positions, images, strict=True):
            expanded_ids += ids[copied_until:token_position]
            image_starts.append(len(expanded_ids))
            expanded_ids += [self.token] * self._count_tokens(image)
            copied_until = token_position + 1
        return [*expanded_ids, *ids[copied_until:]], image_starts

    def _count_tokens(self, image: bytes) -> int:
        """Returns the number of tokens of an image; reads only its size."""
        width, height = size_of(image)
        return int(self._processor.get_number_of_image_patches(height, width, {})) // self._merge**2

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an image; larger images are scaled down."""
        merged_patch_size = self._processor.patch_size * self._merge
        return max(1, int(self._processor.size["longest_edge"]) // merged_patch_size**2)

    def blank(self, num_tokens: int) -> PromptImages:
        """Returns an image of zeros with `num_tokens` tokens, at position 0."""
        grids = np.asarray([[1, self._merge, self._merge * num_tokens]], np.int64)
        width = 3 * self._processor.temporal_patch_size * self._processor.patch_size**2
        patches = np.zeros((int(grids.prod()), width), np.float32)
        return PromptImages((patches,), grids, np.zeros(1, np.int64), self._merge, (b"",))

    def _process(self, image: bytes) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Returns the patches, the grid and the digest of an image."""
        processor_output = self._processor(images=[open_image(image)], return_tensors="np")
        patches = np.ascontiguousarray(processor_output["pixel_values"], np.float32)
        grid = np.asarray(processor_output["image_grid_thw"][0], np.int64)
        digest = hashlib.blake2b(grid.tobytes(), digest_size=16)
        digest.update(patches.data)
        return patches, grid, digest.digest()


def open_image(image: bytes) -> Any:
    """Opens an image with PIL and converts it to RGB.

    Raises:
        ConfigError: The bytes are not an image, or PIL is missing.
    """
    return _read_by_pil(image, lambda opened_image: opened_image.convert("RGB"))


def size_of(image: bytes) -> tuple[int, int]:
    """Returns the width and height of an image in pixels; reads only its header.

    Raises:
        ConfigError: The bytes are not an image, or PIL is missing.
    """
    image_size: tuple[int, int] = _read_by_pil(image, lambda opened_image: opened_image.size)
    return image_size


def make_preview(image: bytes, max_side: int) -> bytes:
    """Returns a small copy of an image as a JPEG file, whose longer side has at most `max_side` pixels.

    Raises:
        ConfigError: The bytes are not an image, or PIL is missing.
    """
    preview, file = open_image(image), io.BytesIO()
    preview.thumbnail((max_side, max_side))
    preview.save(file, "JPEG", quality=80)
    return file.getvalue()


def _read_by_pil(image: bytes, function: Callable[[Any], Any]) -> Any:
    pillow = require_package("PIL.Image", "pictures need Pillow")
    try:
        return function(pillow.open(io.BytesIO(image)))
    except (
        OSError,
        ValueError,
        pillow.DecompressionBombError,
        SyntaxError,
    ) as error:  # raised by readers of PIL's formats
        raise ConfigError(f"a picture of {len(image)} bytes is none: {error}") from None


def has_vision(config: Any) -> bool:
    """Returns whether a model's configuration includes a vision tower."""
    return getattr(config, "vision_config", None) is not None


def load_image_processor(
    path: str, trust_remote_code: bool = False, *, key: str = "actor.model.model_path"
) -> PromptImageProcessor:
    """Creates the image processor for the model of a folder or hub name.

    Raises:
        ConfigError: The model has no vision tower, is of an unsupported family, or has no image processor.
    """
    from rlhpc.language.hugging_face import load_model_config

    config = load_model_config(path, trust_remote_code)
    if not has_vision(config):
        raise ConfigError(
            f"data: prompts have pictures, and the model in {path} ({key}), a {config.model_type}, reads text alone: take a "
            f"model that looks at pictures ({', '.join(FAMILIES)}), or data without"
        )
    require_family(config, path, key)
    from transformers import AutoImageProcessor

    try:
        image_processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"the model in {path} ({key}) looks at pictures, and has no image processor that can be loaded "
            f"({first_line(error)}): put the preprocessor_config.json that came with it beside config.json"
        ) from None
    return PromptImageProcessor(image_processor, int(config.image_token_id), path)


def require_family(config: Any, path: str, key: str) -> None:
    """Refuses vision-language models of unsupported families with a ConfigError."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"{key} is {path}, a {config.model_type}, which looks at pictures in a way that is not known here; allowed: "
            f"{', '.join(FAMILIES)}, and models of text"
        )


def multimodal_form(message: dict[str, str]) -> dict[str, Any]:
    """Converts a message to the multimodal form of chat templates: text parts, with an image part at each `MARK`."""
    text_segments = message["content"].split(MARK)
    content_parts = list[dict[str, str]]()
    for segment_number, text_segment in enumerate(text_segments):
        content_parts += [{"type": "image"}] * (segment_number > 0) + [{"type": "text", "text": text_segment}] * bool(
            text_segment
        )
    return {**message, "content": content_parts}


def insert_image_parts(messages: Sequence[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Returns a conversation with image parts: at each `MARK`, or, without any `MARK`, before the last user message."""
    placed_messages = [dict(message) for message in messages]
    if not any(MARK in message["content"] for message in placed_messages):
        question = next((m for m in reversed(placed_messages) if m["role"] == "user"), placed_messages[-1])
        question["content"] = MARK * num_images + question["content"]
    return [multimodal_form(message) for message in placed_messages]


def check_vision(cfg: LanguageConfig, config: Any, has_images: bool) -> None:
    """Checks that the run's settings are supported for a vision-language model.

    Args:
        cfg: Configuration of the run.
        config: Configuration of the model.
        has_images: Whether training prompts have images.

    Raises:
        ConfigError: A setting is not supported; the message names its key.
    """
    path, actor, lora_config = str(cfg.actor.model.model_path), cfg.actor, cfg.actor.lora
    if has_images and cfg.agent.kind not in _IMAGE_AGENT_KINDS:
        raise ConfigError(
            f"agent.kind is {cfg.agent.kind}, which asks the model with texts of its own, and prompts of data.train show "
            f"pictures; allowed: {', '.join(_IMAGE_AGENT_KINDS)}"
        )
    if not has_vision(config):
        return
    require_family(config, path, "actor.model.model_path")
    if str(select(cfg, "rollout.weight_sync")) == "shards":
        raise ConfigError(f"rollout.weight_sync is 'shards', and the model in {path} looks at pictures; allowed: auto")
    if actor.training_backend not in _BACKENDS:
        raise ConfigError(
            f"actor.training_backend is {actor.training_backend!r}, and the model in {path} looks at pictures: ranks that see "
            f"none in a micro-batch would not take part in gathering what looks at them; allowed: {', '.join(_BACKENDS)}"
        )
    if axis := next((name for name in ("context", "tensor", "expert") if getattr(actor.parallel, name) > 1), ""):
        raise ConfigError(
            f"actor.parallel.{axis} is {getattr(actor.parallel, axis)}, and the model in {path} looks at pictures, which is "
            "divided by shard and replicate alone; allowed: 1"
        )
    if has_images and select(cfg, "teacher.rollout_backend"):
        raise ConfigError(
            "teacher.rollout_backend is 'vllm', and prompts of data.train show pictures, which a teacher in vLLM is not "
            "shown; allowed: null"
        )
    if lora_config.rank and select(cfg, "rollout.merge_adapters") is False:
        raise ConfigError(
            f"rollout.merge_adapters is false, and the model in {path} looks at pictures: vLLM would leave out adapters "
            "of what looks at them; allowed: true"
        )
    if actor.model.freeze_vision and lora_config.rank:
        raise ConfigError(
            f"actor.model.freeze_vision is true and actor.lora.rank is {lora_config.rank}: adapters leave all else as it is; "
            "say with actor.lora.target_modules which layers get some"
        )


_DATA_URL_PREFIX = "data:image/"
_FORMS = "a file's path, a data URL (data:image/png;base64,…), {bytes: …}, or a list of these"


def read_images(column_value: Any, folder: Path) -> tuple[bytes, ...]:
    """Returns the images of a row as the bytes of their files.

    Args:
        column_value: Value of the row's image column: a path, a data URL, `{bytes: …}`, a PIL image, or a list of these; None
            for no images.
        folder: Base of relative paths.

    Raises:
        ConfigError: The value has a different form, or a file cannot be read.
    """
    return tuple(_read_image_bytes(image, folder) for image in _as_sequence(column_value))


def check_images(column_value: Any, folder: Path) -> None:
    """Checks the images of a row without reading files: paths must exist, and embedded images must have a size.

    Raises:
        ConfigError: An image is invalid, or its file does not exist.
    """
    for image in _as_sequence(column_value):
        if not isinstance(image, str) or image.startswith(_DATA_URL_PREFIX):
            size_of(_read_image_bytes(image, folder))
        elif not _resolve_path(image, folder).is_file():
            raise ConfigError(f"there is no file {_resolve_path(image, folder)}")


def image_names(column_value: Any) -> str:
    """Returns a text that identifies a row's images, from paths and digests of embedded images, without reading files."""
    image_contents = [
        image if isinstance(image, str) and not image.startswith(_DATA_URL_PREFIX) else _read_image_bytes(image, Path())
        for image in _as_sequence(column_value)
    ]
    return repr([image if isinstance(image, str) else digest_of(image) for image in image_contents])


def digest_of(image: bytes) -> str:
    """Returns the digest of an image file's bytes, in hexadecimal."""
    return hashlib.blake2b(image, digest_size=16).hexdigest()


def _as_sequence(column_value: Any) -> Sequence[Any]:
    if column_value is None:
        return ()
    return (
        column_value
        if isinstance(column_value, Sequence) and not isinstance(column_value, (str, bytes))
        else (column_value,)
    )


def _read_image_bytes(image: Any, folder: Path) -> bytes:
    """Returns the contents of an image file from a path, a data URL, `{bytes: …}` or a PIL image."""
    if isinstance(image, Mapping):
        image_bytes = image.get("bytes")
        image = image_bytes if image_bytes is not None else image.get("path")
    if isinstance(image, bytes):
        return image
    if hasattr(image, "save"):  # a PIL image: `datasets` decodes images
        return _encode_png(image)
    if not isinstance(image, str) or not image:
        raise ConfigError(f"a picture is {type(image).__name__}; allowed: {_FORMS}")
    if image.startswith(_DATA_URL_PREFIX):
        return from_url(image)
    try:
        return _resolve_path(image, folder).read_bytes()
    except OSError as error:
        raise ConfigError(f"{_resolve_path(image, folder)} cannot be read: {error.strerror}") from None


def from_url(url: str) -> bytes:
    """Returns the bytes of the image in a data URL.

    Raises:
        ConfigError: The URL is not a base64 data URL of an image.
    """
    header, _, body = url.partition(",")
    if not header.startswith(_DATA_URL_PREFIX) or not header.endswith(";base64"):
        raise ConfigError(f"a picture is the URL {url[:40]!r}; allowed: data:image/png;base64,… and its like")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"a picture's data URL is not base64: {error}") from None


def _encode_png(image: Any) -> bytes:
    import io

    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()


def _resolve_path(image: str, folder: Path) -> Path:
    path = expand_home(image)
    return path if path.is_absolute() else folder / path
