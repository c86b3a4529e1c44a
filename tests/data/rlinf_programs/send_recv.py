"""Two groups of RLinf's API that exchange objects and tensors rank by rank, with blocking calls and with coroutines."""

import torch
from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker

LEFT, RIGHT = "left_group", "right_group"


class Left(Worker):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def exchange(self):
        self.log_info(f"rank {self._rank} of {self._world_size} begins")
        self.send({"rank": self._rank, "note": "hello"}, dst_group_name=RIGHT, dst_rank=self._rank)
        reply = self.recv(src_group_name=RIGHT, src_rank=self._rank)
        next_rank = (self._rank + 1) % self._world_size
        self.send([torch.full((2, 2), float(self._rank)) * self.scale] * 3, RIGHT, next_rank)
        self.send_tensor(torch.arange(4, dtype=torch.float32) + self._rank, dst_group_name=RIGHT, dst_rank=next_rank)
        return reply

    async def exchange_async(self):
        work = self.send({"weights": torch.ones(3) * self._rank}, RIGHT, self._rank, async_op=True)
        await work.async_wait()
        return await self.recv(RIGHT, self._rank, async_op=True).async_wait()

    def share(self, groups):
        return self.broadcast({"version": 7} if self._rank == 0 else None, groups=groups)


class Right(Worker):
    def exchange(self):
        message = self.recv(src_group_name=LEFT, src_rank=self._rank)
        self.send(f"{message['note']} from {message['rank']}", dst_group_name=LEFT, dst_rank=self._rank)
        previous = (self._rank - 1) % self._world_size
        tensors = self.recv(LEFT, previous)
        buffer = torch.empty(4)
        self.recv_tensor(buffer, src_group_name=LEFT, src_rank=previous)
        return sum(float(tensor.sum()) for tensor in tensors), buffer.tolist()

    async def exchange_async(self):
        received = await self.recv(LEFT, self._rank, async_op=True).async_wait()
        await self.send(received["weights"].sum().item(), LEFT, self._rank, async_op=True).async_wait()

    def share(self, groups):
        return self.broadcast(None, groups=groups)


def main():
    cluster = Cluster(num_nodes=1)
    placement = NodePlacementStrategy([0, 0])
    left = Left.create_group(10.0).launch(cluster=cluster, name=LEFT, placement_strategy=placement)
    right = Right.create_group().launch(cluster=cluster, name=RIGHT, placement_strategy=placement)

    sent, received = left.exchange(), right.exchange()
    assert sent.wait() == ["hello from 0", "hello from 1"]
    assert received.wait() == [(120.0, [1.0, 2.0, 3.0, 4.0]), (0.0, [0.0, 1.0, 2.0, 3.0])]

    sums, done = left.exchange_async(), right.exchange_async()
    assert sums.wait() == [0.0, 3.0]
    done.wait()

    groups = [(LEFT, [0, 1]), (RIGHT, [0, 1])]
    shared = [left.share(groups), right.share(groups)]
    assert [result["version"] for handle in shared for result in handle.wait()] == [7] * 4
    assert left.execute_on(1).share([(LEFT, 1)]).wait() == [None]
    print("exchanged")


if __name__ == "__main__":
    main()
