"""RLinf's module names, mapped to rlhpc: for running RLinf's tests on rlhpc, and for nothing else.

The modules exist only as a table (`MODULES`). Names of RLinf that rlhpc has nothing for are `Absent`: they can be imported, so
that the other tests of their file run, and say so when they are used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from rlinf import placements, workers


def absent(what: str) -> type:
    """Returns a class in place of one that rlhpc has nothing for; constructing it, or reading an attribute, says why."""
    reason = what if what.startswith("RLinf's") else f"rlhpc has no {what}"

    class Meta(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise NotImplementedError(reason)

    class Absent(metaclass=Meta):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(reason)

    return Absent


_SCHEDULER: dict[str, Any] = {
    "Channel": workers.Channel,
    "ChannelWorker": workers.ChannelWorker,
    "Cluster": workers.Cluster,
    "CollectiveGroupOptions": workers.CollectiveGroupOptions,
    "AcceleratorType": workers.AcceleratorType,
    "ComponentPlacement": placements.HybridComponentPlacement,
    "FlexiblePlacementStrategy": placements.FlexiblePlacementStrategy,
    "NodePlacementStrategy": placements.NodePlacementStrategy,
    "PackedPlacementStrategy": placements.PackedPlacementStrategy,
    "Worker": workers.Worker,
    "WorkerAddress": workers.WorkerAddress,
}
#: Modules of RLinf → their names.
MODULES: dict[str, dict[str, Any]] = {
    "rlinf.scheduler": _SCHEDULER,
    "rlinf.scheduler.channel": {},
    "rlinf.scheduler.channel.channel_worker": {
        "ChannelWorker": workers.ChannelWorker,
        "LocalChannel": absent("channels inside one process"),
    },
    "rlinf.scheduler.cluster": {"Cluster": workers.Cluster},
    "rlinf.scheduler.cluster.cluster": {
        "ClusterEnvVar": workers.ClusterEnvVar,
        "PathEnvMergeMode": workers.PathEnvMergeMode,
    },
    "rlinf.scheduler.cluster.config": {
        "ClusterConfig": workers.ClusterConfig,
        "NodeGroupEnvConfig": placements.NodeGroupEnvConfig,
    },
    "rlinf.scheduler.cluster.node": {
        "NodeGroupInfo": placements.NodeGroupInfo,
        "NodeInfo": placements.NodeInfo,
    },
    "rlinf.scheduler.collective": {},
    "rlinf.scheduler.collective.collective_group": {"CollectiveGroup": absent("collective groups")},
    "rlinf.scheduler.collective.multi_channel_pg": {"MultiChannelProcessGroup": absent("multi-channel process groups")},
    "rlinf.scheduler.hardware": {
        "Accelerator": placements.Accelerator,
        "HardwareInfo": placements.HardwareInfo,
        "HardwareResource": placements.HardwareResource,
    },
    "rlinf.scheduler.hardware.accelerators": {},
    "rlinf.scheduler.hardware.accelerators.amd_gpu": {"RocprofSysConfig": absent("start of ranks under rocprof-sys")},
    "rlinf.scheduler.hardware.accelerators.nvidia_gpu": {"NsightConfig": workers.NsightConfig},
    "rlinf.scheduler.hardware.robots": {},
    "rlinf.scheduler.hardware.robots.franka": {"FrankaConfig": absent("robots as resources of nodes")},
    "rlinf.scheduler.manager": {},
    "rlinf.scheduler.manager.coll_manager": {"CollectiveManager": absent("managers, which are actors of Ray")},
    "rlinf.scheduler.manager.manager": {"Manager": absent("managers, which are actors of Ray")},
    "rlinf.utils": {},
    "rlinf.utils.placement": {
        "HybridComponentPlacement": placements.HybridComponentPlacement,
        "ModelParallelComponentPlacement": placements.ModelParallelComponentPlacement,
    },
}
for _name, _members in MODULES.items():
    _module = ModuleType(_name, f"`{_name}`, mapped to rlhpc.")
    _module.__dict__.update(_members, __path__=[])
    sys.modules[_name] = _module
    _parent, _, _child = _name.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
