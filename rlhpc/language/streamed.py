"""Converts weights offline with the memory of one tensor: what ranks wrote in parts is written on in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from rlhpc.checkpoint.tensor_slice import Box
    from rlhpc.language.model_config import PretrainedConfig
    from rlhpc.training.safetensors_writer import Layout

_PREFIX = "model."
Written = Iterator[tuple[str, "Box", torch.Tensor]]


def stream_shards(
    folder: Path,
    shards: Path,
    model: PretrainedConfig,
    dtype: torch.dtype,
    load: Callable[..., Any],
    base: str,
    frozen: Container[str] = (),
) -> int:
    """Writes the Hugging Face folder of a sharded checkpoint that has all trained weights, box by box.

    Args:
        folder: Made if missing.
        shards: The checkpoint's.
        model: A folder with config and tokenizer of the model.
        dtype: Of the weights written.
        load: How a model like that is built: `load_causal_lm`, or `load_scalar_model`.
        base, frozen: See `untrained_weights`.

    Returns:
        How many parameters there are.

    Raises:
        CheckpointError: A file is damaged, or is of another model.
    """
    from rlhpc.checkpoint.tensor_slice import whole
    from rlhpc.training.distributed_checkpoint import saved_boxes
    from rlhpc.training.parameter_names import checkpoint_parts
    from rlhpc.training.shard_layout import within

    skeleton = load(model, dtype=dtype, empty=True)
    layout, shapes = _layout(skeleton, dtype)
    parts, known = checkpoint_parts(skeleton, shapes), dict[str, list[Any]]()
    for name, path, box in saved_boxes(shards):
        if name.startswith(_PREFIX):
            known.setdefault(name.removeprefix(_PREFIX), []).append((path, box))
    if unknown := sorted(known.keys() - shapes.keys()):
        raise CheckpointError(f"{shards}: {unknown[0]} is not of the model that the checkpoint describes")

    def written() -> Written:
        for name, boxes in known.items():
            for read, box in boxes:
                values = read()
                for part in parts[name]:
                    if (cut := within(part.index, box, whole(box.sizes))) is not None:
                        yield part.name, cut[0], values[cut[1]]
        for name, values in untrained_weights(skeleton, known, frozen, model, base, load, shards):
            for part in parts[name]:
                yield part.name, whole(part.shape), part.of(values)

    _write(folder, skeleton, model, layout, written())
    return layout.parameters


def stream_folder(
    folder: Path, model: PretrainedConfig, dtype: torch.dtype, load: Callable[..., Any]
) -> tuple[bool, int]:
    """Writes another model's folder anew, in another dtype, a tensor at a time.

    Returns:
        Whether it could: its weights are in safetensors, under the names that transformers writes; and the parameters.
    """
    from rlhpc.checkpoint.tensor_slice import whole
    from rlhpc.language.tokens.model import model_file
    from rlhpc.training.safetensors_reader import Slices
    from rlhpc.training.safetensors_writer import missing

    slices = Slices.of(partial(model_file, str(model.model_path)))
    skeleton = load(model, dtype=dtype, empty=True)
    if slices is None or missing(skeleton, slices, iter(())):
        return False, 0
    layout, _ = _layout(skeleton, dtype)

    def written() -> Written:
        with slices:
            for name, place in layout.places.items():
                yield name, whole(place.shape), slices.read(name)

    _write(folder, skeleton, model, layout, written())
    return True, layout.parameters


def _layout(skeleton: Any, dtype: torch.dtype) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    """Where its tensors go, and their shapes by the module's own names."""
    from rlhpc.training.safetensors_writer import Layout
    from rlhpc.training.shard_layout import held, names_and_shapes

    tensors = names_and_shapes(skeleton).items()
    layout = Layout({name: (shape, dtype if kind.is_floating_point else kind) for name, (shape, kind) in tensors})
    return layout, {name: tuple(tensor.shape) for name, tensor in held(skeleton)}


def untrained_weights(
    skeleton: Any,
    trained: Container[str],
    frozen: Container[str],
    model: PretrainedConfig,
    base: str,
    load: Callable[..., Any],
    source: Path,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads what a checkpoint of training lacks, frozen parameters and buffers, from the model that training began from.

    Args:
        skeleton: The model on the meta device.
        trained: Names in the module of what the checkpoint has.
        frozen: Names in the module of the parameters that were frozen in training. Any other that is lacking is a fault.
        model: The section that `skeleton` was made of.
        base: Where the model that training began from is.
        load: Builds a model like that: `load_causal_lm`, or `load_scalar_model`.
        source: What messages call the checkpoint.

    Yields:
        Whole tensors by their names in the module, one at a time. Tied ones come once.

    Raises:
        CheckpointError: A trained parameter is missing, or the base model's tensor has another shape.
        ConfigError: The base model is not there.
    """
    from rlhpc.language.tokens.model import model_file
    from rlhpc.training.parameter_names import checkpoint_parts
    from rlhpc.training.safetensors_reader import Slices
    from rlhpc.training.shard_layout import held

    parameters = {name for name, _ in skeleton.named_parameters()}
    lacking = {name: tuple(tensor.shape) for name, tensor in held(skeleton) if name not in trained}
    for name, shape in lacking.items():
        if name in parameters and name not in frozen:
            raise CheckpointError(f"{source}: {name} {list(shape)} is missing")
    if not lacking:
        return
    parts, slices = checkpoint_parts(skeleton, lacking), Slices.of(partial(model_file, base))
    if slices is not None and all(part.name in slices.files for name in lacking for part in parts[name]):
        with slices:
            for name, shape in lacking.items():
                pieces = {part: slices.read(part.name) for part in parts[name]}
                values = torch.empty(shape, dtype=next(iter(pieces.values())).dtype)
                for part, piece in pieces.items():
                    _require_shape(base, part.name, piece, part.shape)
                    part.of(values).copy_(piece)
                yield name, values
        return
    there: dict[str, torch.Tensor] = load(dataclasses.replace(model, model_path=base), dtype=torch.float32).state_dict()
    for name, shape in lacking.items():
        if name not in there:
            raise CheckpointError(f"{source}: {name} {list(shape)} is missing, also in {base}")
        _require_shape(base, name, there[name], shape)
        yield name, there[name]


def _require_shape(base: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{base}: {name} is {list(tensor.shape)} there, and {list(shape)} in the model that was trained; "
            "name the model that training began from with --base"
        )


def _write(folder: Path, skeleton: Any, model: PretrainedConfig, layout: Layout, boxes: Written) -> None:
    from rlhpc.language.tokens.files import model_files
    from rlhpc.runtime.files import write_durably

    layout.begin(folder)
    layout.write(folder, boxes)
    for name, data in model_files(skeleton, model).items():
        write_durably(folder / name, data)
    layout.finish(folder)
