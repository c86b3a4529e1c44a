"""Observation transport from an env rank to a policy rank on the same card: through host memory, or on the device.

The measured step has no simulation and no policy: one rank sends observations of a number of slots, the other rank computes
with them and sends actions back. On the CPU both transports use host memory.
"""

from __future__ import annotations

import copy
import itertools
import time

import torch

from bench.gpu.part import Report, synchronize
from bench.gpu.ranks import launch_groups
from rlhpc import Channel, Worker, WorkerGroup
from rlhpc.runs.device import worker_device
from rlhpc.runtime.comm.context import current

ACTIONS = 8


class Ends(Worker):
    """Rank at one end of the transport: an env rank without a simulator, or a rollout rank without a policy."""

    def show(
        self, outward: Channel, back: Channel, shape: list[int], num_steps: int, stays_on_device: bool
    ) -> tuple[list[float], int]:
        """Returns the seconds of each step, and the number of messages that stayed on the accelerator."""
        device, crossed_before = worker_device(self), current().service.device_channel.num_device_messages
        dtype = torch.uint8 if len(shape) > 2 else torch.float32
        obs = torch.randint(0, 255, shape, device=device).to(dtype)
        durations = []
        for _ in range(num_steps):
            # A handle that has not put anything yet does not know where messages go, and takes the host's road.
            channel = outward if stays_on_device else copy.copy(outward)
            synchronize()
            start_time = time.perf_counter()
            channel.put(obs)
            back.get()
            durations.append(time.perf_counter() - start_time)
            obs.add_(1)
        return durations, current().service.device_channel.num_device_messages - crossed_before

    def act(self, outward: Channel, back: Channel, num_steps: int) -> bool:
        """Answers each observation with actions computed from it; returns whether all observations arrived unchanged."""
        device, sums = worker_device(self), []
        for _ in range(num_steps):
            obs = outward.get().to(device)
            slots = obs.reshape(len(obs), -1).float().mean(1)
            back.put(slots[:, None].expand(-1, ACTIONS).cpu().numpy())
            sums.append(slots)
        return all(bool((first_sum != second_sum).any()) for first_sum, second_sum in itertools.pairwise(sums))


def step(
    env: WorkerGroup, policy: WorkerGroup, shape: list[int], num_steps: int, stays_on_device: bool
) -> tuple[list[float], int]:
    """Returns the seconds of each step, without the first ones, and the number of messages that stayed
    on the accelerator.
    """
    outward, return_channel = Channel.create("there", home=policy.name), Channel.create("back", home=env.name)
    shown_handle, act_handle = (
        env.show(outward, return_channel, shape, num_steps, stays_on_device),
        policy.act(outward, return_channel, num_steps),
    )
    (show_result,) = shown_handle.wait()
    if act_handle.wait() != [True]:
        raise RuntimeError("observations did not arrive as they were sent")
    step_times, num_crossed = show_result
    return step_times[len(step_times) // 4 :], num_crossed


def measure(report: Report) -> None:
    """Measures the exchange of states and pictures over each transport."""
    shapes = (
        [[64, 42], [8, 32, 32, 3]]
        if report.small
        else [[1024, 42], [4096, 42], [256, 128, 128, 3], [2048, 128, 128, 3]]
    )
    steps = 8 if report.small else 40
    with launch_groups(report.device, (Ends, "env", [0]), (Ends, "policy", [0])) as (env, policy):
        for shape in shapes:
            shape_text = " x ".join(map(str, shape))
            for name, stays_on_device in (("host's road", False), ("lane", True)):
                step_times, num_crossed = step(env, policy, shape, steps, stays_on_device)
                report.figure(f"{shape_text}, {name}", [1000 * step_s for step_s in step_times], "ms a step")
                if not report.small and (num_crossed > 0) != stays_on_device:
                    report.fail(f"{shape_text}, {name}", f"{num_crossed} of {steps} messages stayed on the card")
