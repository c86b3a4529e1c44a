"""Mesh sizes of a trained model: the sizes of `actor.parallel`, computed for a number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.config.sections import ParallelConfig


#: Backends that divide weights evenly over all ranks, or not at all.
_BACKENDS_WITHOUT_MESH = frozenset({"local", "deepspeed"})


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of a mesh of ranks.

    The coordinates of rank r are those of index r in the row-major order of (replicate, shard, context, tensor). A *block* is
    `context × tensor` consecutive ranks, which train on the same samples.

    Attributes:
        replicate, shard, context, tensor: Their product is the number of ranks.
        expert: Divides `shard × context × tensor`.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def from_config(cls, parallel: ParallelConfig, num_ranks: int, key: str = "actor.parallel") -> MeshSizes:
        """Returns the sizes for a number of ranks.

        Args:
            parallel: The section.
            num_ranks: Ranks of the group.
            key: Name of the section in messages.

        Raises:
            ConfigError: The sizes do not fit the number of ranks, or each other.
        """
        mesh_sizes = {name: getattr(parallel, name) for name in ("replicate", "context", "tensor", "expert")}
        for name, mesh_size in {**mesh_sizes, "shard": parallel.shard}.items():
            if mesh_size is not None and mesh_size < 1:
                raise ConfigError(f"{key}.{name} is {mesh_size}; it must be at least 1")
        expert = mesh_sizes.pop("expert")
        fixed_size, shard = math.prod(mesh_sizes.values()), parallel.shard
        sizes_text = " × ".join(f"{name} {mesh_size}" for name, mesh_size in mesh_sizes.items())
        if shard is None:
            if num_ranks % fixed_size:
                raise ConfigError(f"{key}: {sizes_text} = {fixed_size} does not divide the group's {num_ranks} ranks")
            shard = num_ranks // fixed_size
        elif shard * fixed_size != num_ranks:
            raise ConfigError(
                f"{key}: {sizes_text} × shard {shard} = {shard * fixed_size}, but the group has {num_ranks} ranks; change a "
                "size, or leave shard null for what the others leave"
            )
        tensor, ranks_per_replica = mesh_sizes["tensor"], num_ranks // mesh_sizes["replicate"]
        if ranks_per_replica % expert:
            raise ConfigError(f"{key}.expert({expert}) does not divide shard × context × tensor ({ranks_per_replica})")
        if expert > 1 and expert % tensor and tensor % expert:
            raise ConfigError(
                f"{key}.expert({expert}) and tensor({tensor}): one of them must divide the other, or experts would be shared "
                "by parts of tensor groups"
            )
        return cls(mesh_sizes["replicate"], shard, mesh_sizes["context"], tensor, expert)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.block

    @property
    def block(self) -> int:
        """Number of ranks in a block, which train on the same samples."""
        return self.context * self.tensor

    @property
    def data(self) -> int:
        """Number of blocks; samples are divided over the blocks."""
        return self.replicate * self.shard

    def data_of(self, rank: int) -> int:
        """Returns the index of a rank's block: its *data coordinate*, which determines its samples."""
        return rank // self.block

    def lane_of(self, rank: int) -> int:
        """Returns the position of a rank in its block. In sums over all ranks, only position 0 of each block counts."""
        return rank % self.block

    def first_of(self, data_parallel_size: int) -> int:
        """Returns the first rank of a block."""
        return data_parallel_size * self.block

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the rank's coordinates along replicate, shard, context and tensor."""
        coordinates: dict[str, int] = {}
        for name in ("tensor", "context", "shard", "replicate"):
            rank, coordinates[name] = divmod(rank, getattr(self, name))
        return coordinates

    @property
    def plain(self) -> bool:
        """True if the mesh only divides samples evenly over ranks, like a backend without a mesh."""
        return self.replicate == self.block == self.expert == 1


def splits_sums(parallel: ParallelConfig) -> bool:
    """Returns whether the ranks of a mesh compute parts of a token's sums, which changes the order of the terms."""
    return max(parallel.context, parallel.tensor, parallel.expert) > 1


class Trained(Protocol):
    """Configuration section of a trained model."""

    @property
    def training_backend(self) -> str:
        """Name of the backend."""

    @property
    def parallel(self) -> ParallelConfig:
        """Sizes of the mesh over which the model is divided."""


def check_parallel(section: Trained, num_ranks: int, key: str, *, layers: bool = True) -> MeshSizes:
    """Returns the mesh sizes of a section for a number of ranks.

    Args:
        section: Section `actor`, or another section with these keys.
        num_ranks: Number of ranks of the group.
        key: Name of the section in messages.
        layers: True if the section may train a model whose layers can be divided.

    Raises:
        ConfigError: The sizes do not fit the ranks, or the backend cannot divide by them.
    """
    mesh_sizes = MeshSizes.from_config(section.parallel, num_ranks, f"{key}.parallel")
    if not mesh_sizes.plain and section.training_backend in _BACKENDS_WITHOUT_MESH:
        raise ConfigError(unsupported_backend_sizes(key, section.training_backend, mesh_sizes))
    if not layers and (mesh_sizes.block > 1 or mesh_sizes.expert > 1):
        raise ConfigError(unsupported_policy_sizes(key, mesh_sizes))
    return mesh_sizes


def unsupported_backend_sizes(key: str, backend: str, sizes: MeshSizes) -> str:
    """Formats the message about mesh sizes that a backend does not support."""
    dims = [name for name in ("replicate", "context", "tensor", "expert") if getattr(sizes, name) > 1]
    return (
        f"{key}.parallel.{dims[0]} is {getattr(sizes, dims[0])}: only {key}.training_backend=fsdp divides a model so; "
        f"{backend} takes 1"
    )


def unsupported_policy_sizes(key: str, sizes: MeshSizes) -> str:
    """Formats the message about mesh sizes that a module without a parallel plan does not support."""
    dim = next(name for name in ("context", "tensor", "expert") if getattr(sizes, name) > 1)
    return (
        f"{key}.parallel.{dim}({getattr(sizes, dim)}) is for language models, whose layers transformers has plans for; "
        "this kind of policy is divided by shard and replicate alone: set it to 1"
    )
