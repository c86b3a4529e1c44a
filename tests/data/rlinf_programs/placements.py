"""Groups of RLinf's API on a placement from a configuration, with batches routed between groups of different sizes."""

import os

import torch
from omegaconf import OmegaConf
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker
from rlinf.utils.placement import HybridComponentPlacement

BATCH = 12


class Env(Worker):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg

    def interact(self, channel, steps):
        rows = BATCH // self._world_size
        obs = torch.arange(self._rank * rows, (self._rank + 1) * rows, dtype=torch.float32)
        for stage in range(steps):
            self.send_to("rollout", channel, {"obs": obs, "stage": stage}, mode="train", tag="obs", route_key=stage)
            obs = self.recv_from("rollout", channel, tag="actions", batch_size=BATCH, route_key=stage)
        return obs.tolist()


class Rollout(Worker):
    def __init__(self, cfg):
        super().__init__()
        self.gain = cfg.rollout.gain

    def generate(self, channel, steps):
        for stage in range(steps):
            batch = self.recv_from("env", channel, tag="train_obs", batch_size=BATCH, route_key=stage)
            assert batch["stage"] == stage
            self.send_to("env", channel, batch["obs"] * self.gain, tag="actions", route_key=stage, async_op=True)
        return len(batch["obs"])


class Server(Worker):
    def ports(self):
        return [self.acquire_free_port() for _ in range(3)]

    def exclusive(self, path):
        with self.device_lock:
            with open(path, "a") as log:
                log.write(f"{self._rank}\n")
            return os.path.exists(path)


def main(folder):
    cfg = OmegaConf.create(
        {
            "cluster": {"num_nodes": 1, "component_placement": {"env": "0:0-2", "rollout": "0:0-1"}},
            "rollout": {"gain": 2.0},
        }
    )
    cluster = Cluster(cfg.cluster.num_nodes)
    placement = HybridComponentPlacement(cfg, cluster)
    groups = {
        name: cls.create_group(cfg).launch(cluster, name=name, placement_strategy=placement.get_strategy(name))
        for name, cls in (("env", Env), ("rollout", Rollout))
    }
    channel = Channel.create("between")
    env, rollout = groups["env"].interact(channel, 3), groups["rollout"].generate(channel, 3)
    assert [row for rows in env.wait() for row in rows] == [8.0 * row for row in range(BATCH)]
    assert rollout.wait() == [6, 6]

    servers = Server.create_group().launch(cluster, placement_strategy=NodePlacementStrategy([0, 0]), name="servers")
    ports = [port for of_rank in servers.ports().wait() for port in of_rank]
    assert len(set(ports)) == 6
    assert servers.exclusive(os.path.join(folder, "order")).wait() == [True, True]
    print("placed")


if __name__ == "__main__":
    main(os.getcwd())
