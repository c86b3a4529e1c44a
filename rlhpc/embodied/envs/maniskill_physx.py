"""Batched CPU simulation of a ManiSkill task's slots in one process: PhysX steps the slots one by one, and all other
computations are batched.

ManiSkill batches only on a GPU. On a CPU each environment evaluates its observations, rewards and controllers
separately, and small tensor operations take four fifths of a step. In this module every slot has a separate CPU scene,
but ManiSkill accesses the scenes through the interface of PhysX's GPU system (buffers `[bodies, 13]` and
`[articulations, dof]` that are applied and fetched), so that its Python code runs once per step for all slots. At every
step, a slot has the same physics as a single CPU environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partialmethod
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils.geometry import rotation_conversions
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.articulation_joint import ArticulationJoint
from mani_skill.utils.structs.base import PhysxRigidBodyComponentStruct
from sapien import physx

#: Versions with which the replacements in this module were checked.
VERIFIED = {"mani_skill": "3.0"}


class _PhysxBuffer:
    """Tensor with the interface of PhysX's GPU buffers; records which rows were changed."""

    def __init__(self, *shape: int) -> None:
        self.tensor = torch.zeros(*shape)
        self.array = self.tensor.numpy()
        self.synced_array = self.array.copy()

    def torch(self) -> torch.Tensor:
        return self.tensor

    def pop_changed_rows(self, columns: slice = slice(None)) -> list[int]:
        """Returns the rows that were written since they were last read or applied."""
        rows = np.flatnonzero((self.array[:, columns] != self.synced_array[:, columns]).any(1))
        self.synced_array[:, columns] = self.array[:, columns]
        changed_rows: list[int] = rows.tolist()
        return changed_rows

    def mark_synced(self) -> None:
        self.synced_array[...] = self.array


class _ContactQuery:
    """Query of the contact impulses `[n, 3]` of bodies, or of pairs of bodies."""

    def __init__(self, bodies: list[Any]) -> None:
        self.bodies = bodies
        self.cuda_impulses = _PhysxBuffer(len(bodies), 3)


class BatchedPhysx:
    """CPU implementation of the interface of `PhysxGpuSystem` that ManiSkill uses. The apply methods write only changed
    rows.
    """

    def __init__(self, scenes: list[sapien.Scene]) -> None:
        self.systems = [scene.physx_system for scene in scenes]
        self.cuda_rigid_body_data = _PhysxBuffer(0, 13)
        self._queried_pointers: set[int] = set()
        self._impulses: dict[int, list[tuple[int, int, np.ndarray]]] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # ManiSkill selects its batched code by isinstance.
        return physx.PhysxGpuSystem

    @property
    def timestep(self) -> float:
        step: float = self.systems[0].timestep
        return step

    @timestep.setter
    def timestep(self, value: float) -> None:
        for system in self.systems:
            system.timestep = value

    def gpu_init(self) -> None:
        """Assigns rows to all bodies and articulations, and allocates the buffers."""
        self._rows: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._bodies: list[Any] = []
        self._links: list[tuple[int, Any]] = []
        self._dynamic_bodies: list[tuple[int, Any]] = []
        self._articulations: list[Any] = []
        self._articulation_rows: dict[str, int] = {}
        self._roots: list[tuple[int, Any]] = []
        for slot, system in enumerate(self.systems):
            for body in system.rigid_static_components:
                self._slots[body._physx_pointer] = slot
            for body in system.rigid_dynamic_components:
                self._dynamic_bodies.append((self._add_body(slot, body), body))
            for link in system.articulation_link_components:
                row = self._add_body(slot, link)
                self._links.append((row, link))
                if link.is_root:
                    self._articulation_rows[link.articulation.links[0]._physx_pointer] = len(self._articulations)
                    self._roots.append((row, link.articulation))
                    self._articulations.append(link.articulation)
        self._is_free = np.ones(len(self._bodies), bool)  # bodies that are not links
        self._is_free[[row for row, _ in self._links]] = False
        self._joints = [art.active_joints for art in self._articulations]
        self._dofs = [art.dof for art in self._articulations]
        widest = max(self._dofs, default=0)
        self.cuda_rigid_body_data = _PhysxBuffer(len(self._bodies), 13)
        names = ("qpos", "qvel", "qacc", "qf", "target_qpos", "target_qvel")
        self._joint_buffers = {name: _PhysxBuffer(len(self._articulations), widest) for name in names}
        for articulation_row, joints in enumerate(self._joints):
            for column, joint in enumerate(joints):
                self._joint_buffers["target_qpos"].array[articulation_row, column] = joint.drive_target[0]
                self._joint_buffers["target_qvel"].array[articulation_row, column] = joint.drive_velocity_target[0]
        for name, buffer in self._joint_buffers.items():
            setattr(self, f"cuda_articulation_{name}", buffer)
            buffer.mark_synced()

    def _add_body(self, slot: int, body: Any) -> int:
        row = len(self._bodies)
        self._bodies.append(body)
        self._rows[body._physx_pointer], self._slots[body._physx_pointer] = row, slot
        return row

    def body_row(self, body: Any) -> int:
        """Returns the row of a body in `cuda_rigid_body_data`."""
        return self._rows[body._physx_pointer]

    def articulation_row(self, articulation: Any) -> int:
        """Returns the row of an articulation in the `cuda_articulation_…` buffers."""
        return self._articulation_rows[articulation.links[0]._physx_pointer]

    def step(self) -> None:
        """Applies the current drive targets and steps all scenes."""
        self.gpu_apply_articulation_target_position()
        self.gpu_apply_articulation_target_velocity()
        for system in self.systems:
            system.step()
        self._impulses = {}

    # -- from the simulators ----------------------------------------------------------------------------------------

    def _fetch_bodies(self, bodies: list[tuple[int, Any]]) -> None:
        body_data, synced_rows = self.cuda_rigid_body_data.array, self.cuda_rigid_body_data.synced_array
        for row, body in bodies:
            pose, body_row = body.entity_pose, body_data[row]
            body_row[:3], body_row[3:7] = pose.p, pose.q
            body_row[7:10], body_row[10:] = body.linear_velocity, body.angular_velocity
        rows = [row for row, _ in bodies]
        synced_rows[rows] = body_data[rows]

    def gpu_fetch_rigid_dynamic_data(self) -> None:
        self._fetch_bodies(self._dynamic_bodies)

    def gpu_fetch_articulation_link_pose(self) -> None:
        self._fetch_bodies(self._links)

    def gpu_fetch_articulation_link_velocity(self) -> None:
        """Does nothing: velocities are fetched with the poses."""

    def _fetch(self, name: str) -> None:
        buffer = self._joint_buffers[name]
        for row, (articulation, dof) in enumerate(zip(self._articulations, self._dofs, strict=True)):
            buffer.array[row, :dof] = getattr(articulation, name)
        buffer.mark_synced()

    gpu_fetch_articulation_qpos = partialmethod(_fetch, "qpos")
    gpu_fetch_articulation_qvel = partialmethod(_fetch, "qvel")
    gpu_fetch_articulation_qacc = partialmethod(_fetch, "qacc")

    def gpu_fetch_articulation_target_qpos(self) -> None:
        """Does nothing: simulators do not change targets."""

    def gpu_fetch_articulation_target_qvel(self) -> None:
        """Does nothing: simulators do not change targets."""

    def gpu_update_articulation_kinematics(self) -> None:
        """Does nothing: a CPU scene updates its kinematics itself."""

    def sync_poses_gpu_to_cpu(self) -> None:
        """Does nothing: the poses are on the CPU already."""

    # -- to the simulators ------------------------------------------------------------------------------------------

    def gpu_apply_rigid_dynamic_data(self) -> None:
        body_data, bodies = self.cuda_rigid_body_data, self._bodies
        for row in np.flatnonzero((body_data.array != body_data.synced_array).any(1) & self._is_free).tolist():
            new_row, synced_row, body = body_data.array[row], body_data.synced_array[row], bodies[row]
            if (new_row[:7] != synced_row[:7]).any():
                body.entity.pose = sapien.Pose(new_row[:3], new_row[3:7])
            if not body.kinematic and (new_row[7:] != synced_row[7:]).any():
                body.linear_velocity, body.angular_velocity = new_row[7:10], new_row[10:]
            synced_row[:] = new_row

    def gpu_apply_articulation_root_pose(self) -> None:
        body_data = self.cuda_rigid_body_data
        for row, articulation in self._roots:
            new_pose, synced_pose = body_data.array[row, :7], body_data.synced_array[row, :7]
            if (new_pose != synced_pose).any():
                articulation.root_pose = sapien.Pose(new_pose[:3], new_pose[3:])
                synced_pose[:] = new_pose

    def gpu_apply_articulation_root_velocity(self) -> None:
        body_data = self.cuda_rigid_body_data
        for row, articulation in self._roots:
            new_velocity, synced_velocity = body_data.array[row, 7:], body_data.synced_array[row, 7:]
            if (new_velocity != synced_velocity).any():
                articulation.set_root_linear_velocity(new_velocity[:3])
                articulation.set_root_angular_velocity(new_velocity[3:])
                synced_velocity[:] = new_velocity

    def _apply(self, name: str) -> None:
        buffer = self._joint_buffers[name]
        for row in buffer.pop_changed_rows():
            setattr(self._articulations[row], name, buffer.array[row, : self._dofs[row]])

    gpu_apply_articulation_qpos = partialmethod(_apply, "qpos")
    gpu_apply_articulation_qvel = partialmethod(_apply, "qvel")
    gpu_apply_articulation_qf = partialmethod(_apply, "qf")

    def _apply_targets(self, name: str, setter: str) -> None:
        buffer = self._joint_buffers[name]
        for row in buffer.pop_changed_rows():
            for joint, target in zip(self._joints[row], buffer.array[row].tolist(), strict=False):
                getattr(joint, setter)(target)

    gpu_apply_articulation_target_position = partialmethod(_apply_targets, "target_qpos", "set_drive_target")
    gpu_apply_articulation_target_velocity = partialmethod(_apply_targets, "target_qvel", "set_drive_velocity_target")

    # -- contacts ---------------------------------------------------------------------------------------------------

    def clear_contacts(self, slots: Iterable[int]) -> None:
        """Drops PhysX's contact caches of these slots (see the module's `clear_contacts`)."""
        for slot in slots:
            clear_contacts(self.systems[slot])
        self._impulses = {}

    def _impulses_of(self, body: Any) -> list[tuple[int, int, np.ndarray]]:
        """Returns (first body, second body, impulse) of each contact of queried bodies in the scene of `body`."""
        slot = self._slots[body._physx_pointer]
        if slot not in self._impulses:
            impulses = []
            for contact in self.systems[slot].get_contacts():
                first_body, second_body = (contact_body._physx_pointer for contact_body in contact.bodies)
                if first_body in self._queried_pointers or second_body in self._queried_pointers:
                    impulses.append(
                        (first_body, second_body, np.sum([point.impulse for point in contact.points], axis=0))
                    )
            # Stores impulses instead of contacts, because the next step invalidates the contacts.
            self._impulses[slot] = impulses
        return self._impulses[slot]

    def _create_query(self, bodies: list[Any], queried_bodies: Iterable[Any]) -> _ContactQuery:
        self._queried_pointers.update(body._physx_pointer for body in queried_bodies)
        self._impulses = {}
        return _ContactQuery(bodies)

    def gpu_create_contact_pair_impulse_query(self, pairs: list[tuple[Any, Any]]) -> _ContactQuery:
        return self._create_query(pairs, (first_body for first_body, _ in pairs))

    def gpu_create_contact_body_impulse_query(self, bodies: list[Any]) -> _ContactQuery:
        return self._create_query(bodies, bodies)

    def gpu_query_contact_pair_impulses(self, query: _ContactQuery) -> None:
        for row, (first_body, second_body) in enumerate(query.bodies):
            first_pointer, second_pointer = first_body._physx_pointer, second_body._physx_pointer
            impulse_sum = np.zeros(3)
            for pointer_a, pointer_b, impulse in self._impulses_of(first_body):
                if (pointer_a, pointer_b) == (first_pointer, second_pointer):
                    impulse_sum += impulse
                elif (pointer_b, pointer_a) == (first_pointer, second_pointer):
                    impulse_sum -= impulse
            query.cuda_impulses.array[row] = impulse_sum

    def gpu_query_contact_body_impulses(self, query: _ContactQuery) -> None:
        for row, body in enumerate(query.bodies):
            pointer, impulse_sum = body._physx_pointer, np.zeros(3)
            for pointer_a, pointer_b, impulse in self._impulses_of(body):
                if pointer in (pointer_a, pointer_b):
                    impulse_sum += impulse if pointer_a == pointer else -impulse
            query.cuda_impulses.array[row] = impulse_sum


class BatchedScene(ManiSkillScene):
    """Scene of ManiSkill over the CPU scenes of `BatchedPhysx`."""

    def __init__(self, sub_scenes: list[sapien.Scene], **kwargs: Any) -> None:
        super().__init__(sub_scenes, **kwargs)
        self.px: Any = BatchedPhysx(sub_scenes)
        self.gpu_sim_enabled = True

    def step(self) -> None:
        """Executes one simulation step."""
        self.px.step()


def _replace_index(cls: Any, name: str, index_of: Any) -> None:
    """Replaces a cached index of a ManiSkill struct by the index in `BatchedPhysx`, for structs in a `BatchedScene`."""
    original_index = vars(cls)[name].func

    def look_up(self: Any) -> torch.Tensor:
        if isinstance(self.scene, BatchedScene):
            return torch.tensor(index_of(self, self.scene.px), dtype=torch.int32)
        index: torch.Tensor = original_index(self)
        return index

    cached_index = cached_property(look_up)
    cached_index.__set_name__(cls, name)
    setattr(cls, name, cached_index)


_compute_ik = Kinematics.compute_ik


def _inverse_kinematics(
    self: Any, pose: Any, q0: torch.Tensor, is_delta_pose: bool = False, current_pose: Any = None, **options: Any
) -> Any:
    """Computes `Kinematics.compute_ik` for end-effector controllers slot by slot, as ManiSkill's CPU simulation does.

    ManiSkill's variant for all slots at once needs a GPU and stops after one step of the solver.
    """
    if not isinstance(self.articulation.scene, BatchedScene):
        return _compute_ik(self, pose, q0, is_delta_pose=is_delta_pose, current_pose=current_pose, **options)
    if is_delta_pose:
        # Computes the targets of controllers in the frame root_translation:root_aligned_body_rotation. The angles are zero for
        # controllers without rotation.
        rotation = rotation_conversions.matrix_to_quaternion(
            rotation_conversions.euler_angles_to_matrix(pose[:, 3:], "XYZ")
        )
        target_rotation = rotation_conversions.quaternion_multiply(rotation, current_pose.q)
        positions, rotations = (current_pose.p + pose[:, :3]).numpy(), target_rotation.numpy()
    else:
        positions, rotations = pose.p.numpy(), pose.q.numpy()
    start = q0[:, self.pmodel_active_joint_indices].numpy()
    joint_positions = np.empty((len(start), len(self.pmodel_controlled_joint_indices)), np.float32)
    for slot, initial in enumerate(start):
        target = sapien.Pose(positions[slot], rotations[slot])
        solution, success, _ = self.pmodel.compute_inverse_kinematics(
            self.end_link_idx, target, initial_qpos=initial, active_qmask=self.qmask, max_iterations=100
        )
        joint_positions[slot] = (solution if success else initial)[self.pmodel_controlled_joint_indices]
    return torch.from_numpy(joint_positions)


Kinematics.compute_ik = _inverse_kinematics
_replace_index(
    PhysxRigidBodyComponentStruct, "_body_data_index", lambda s, px: [px.body_row(body) for body in s._bodies]
)
_replace_index(Articulation, "_data_index", lambda s, px: [px.articulation_row(art) for art in s._objs])
_replace_index(
    ArticulationJoint, "_data_index", lambda s, px: [px.articulation_row(art) for art in s._physx_articulations]
)


def clear_contacts(system: Any) -> None:
    """Drops PhysX's contact caches, so that an episode does not depend on steps before its reset."""
    packed_state = system.pack()
    movable_bodies = [body for body in system.rigid_dynamic_components if not body.kinematic]
    for i, body in enumerate(movable_bodies):
        body.entity.pose = sapien.Pose([0, 0, 1000 + 20 * i])
    roots = [link.articulation for link in system.articulation_link_components if link.is_root]
    for i, articulation in enumerate(roots):
        articulation.root_pose = sapien.Pose([0, 0, 1000 + 20 * (len(movable_bodies) + i)])
    system.step()
    system.unpack(packed_state)
