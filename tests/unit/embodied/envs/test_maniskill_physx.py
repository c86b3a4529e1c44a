"""What `maniskill_physx` assumes of ManiSkill: the names that it replaces, and who reads them."""

from __future__ import annotations

import inspect
import re
from functools import cached_property
from pathlib import Path

from tests.extras import need_extra

need_extra("embodied")
import mani_skill
from mani_skill.agents.controllers import pd_ee_pose
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.articulation_joint import ArticulationJoint
from mani_skill.utils.structs.base import PhysxRigidBodyComponentStruct

from rlhpc.embodied.envs import maniskill_physx


def test_replaced_indices_are_cached_properties() -> None:
    for struct, name in (
        (PhysxRigidBodyComponentStruct, "_body_data_index"),
        (Articulation, "_data_index"),
        (ArticulationJoint, "_data_index"),
    ):
        index = vars(struct)[name]
        assert isinstance(index, cached_property), f"{struct.__name__}.{name}"
        assert "BatchedScene" in inspect.getsource(index.func), "not replaced"


def test_controllers_call_the_replaced_inverse_kinematics() -> None:
    assert Kinematics.compute_ik is maniskill_physx._inverse_kinematics
    call = inspect.signature(maniskill_physx._compute_ik).parameters
    for name in ("pose", "q0", "is_delta_pose", "current_pose"):
        assert name in call, f"compute_ik has no argument {name}: read it, and change maniskill_physx"
    assert ".compute_ik(" in inspect.getsource(pd_ee_pose)


#: Methods of ManiSkill's structures whose buffers the batched system has not; a task that calls one raises AttributeError.
ABSENT = {"apply_force": "cuda_rigid_body_force", "get_link_incoming_joint_forces": "incoming_joint_forces"}


def test_the_interface_of_physx_is_what_tasks_use() -> None:
    """Each `px.gpu_…` and `px.cuda_…` that ManiSkill reads is one of the batched system, or no task of ManiSkill needs it."""
    package = Path(mani_skill.__file__).parent
    uses = {
        name
        for path in [package / "envs" / "scene.py", *(package / "utils" / "structs").glob("*.py")]
        for name in re.findall(r"\bpx\.((?:gpu|cuda)_\w+)", path.read_text())
    }
    known = inspect.getsource(maniskill_physx)
    missing = {name for name in uses - {"gpu_init"} if name not in known and not name.startswith("cuda_articulation_")}
    assert missing == {
        "cuda_rigid_body_force", "gpu_apply_rigid_dynamic_force", "gpu_fetch_articulation_link_incoming_joint_forces",
    }  # fmt: skip
    for path in [*(package / "envs").rglob("*.py"), *(package / "agents").rglob("*.py")]:
        text = path.read_text()
        for method in ABSENT:
            assert f".{method}(" not in text, f"{path.name} calls {method}: BatchedPhysx needs {ABSENT[method]}"
