"""Training backends: gradients, data parallelism, sharding and the optimizer behind one interface.

Names are imported on first use, so that a list of the backends needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhpc.runtime.imports import lazy_names

_NAMES_BY_MODULE = {
    "rlhpc.training.backend": ["Blueprint", "TrainingBackend"],
    "rlhpc.training.registry": ["make_backend"],
    "rlhpc.training.data_parallel": ["ReplicatedBackend"],
}
__all__ = sorted(name for names in _NAMES_BY_MODULE.values() for name in names)
__getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE)

if TYPE_CHECKING:
    from rlhpc.training.backend import Blueprint as Blueprint
    from rlhpc.training.backend import TrainingBackend as TrainingBackend
    from rlhpc.training.data_parallel import ReplicatedBackend as ReplicatedBackend
    from rlhpc.training.registry import make_backend as make_backend
