"""A runner of RLinf's API that trains a bandit: simulators, a policy and a learner, with channels between them."""

import torch
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker

ARMS, SLOTS, EPISODES = 3, 8, 4


class EnvWorker(Worker):
    def __init__(self, payoffs):
        super().__init__()
        self.payoffs = torch.tensor(payoffs)

    @Worker.timer("env/interact")
    def interact(self, obs_channel: Channel, action_channel: Channel, rollout_channel: Channel):
        for episode in range(EPISODES):
            obs_channel.put({"rank": self._rank, "obs": torch.zeros(SLOTS, 1)}, key="obs")
            with self.worker_timer("env/wait"):
                actions = action_channel.get(key=str(self._rank))
            rewards = self.payoffs[actions]
            rollout_channel.put({"actions": actions, "rewards": rewards, "episode": episode}, weight=SLOTS)
        return float(rewards.mean())


class RolloutWorker(Worker):
    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.logits = torch.zeros(ARMS)

    def sync_weights(self, learner):
        self.logits = self.recv(learner, 0)

    @Worker.timer("rollout/generate")
    async def generate(self, obs_channel: Channel, action_channel: Channel, num_envs):
        for _ in range(EPISODES * num_envs):
            request = await obs_channel.get(key="obs", async_op=True).async_wait()
            probabilities = torch.softmax(self.logits, 0).expand(len(request["obs"]), ARMS)
            actions = torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)
            await action_channel.put(actions, key=str(request["rank"]), async_op=True).async_wait()


class LearnerWorker(Worker):
    def __init__(self, lr):
        super().__init__()
        self.logits = torch.zeros(ARMS, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.logits], lr=lr)

    def send_weights(self, rollout):
        self.send(self.logits.detach(), rollout, 0)

    @Worker.timer("learner/train")
    def run_training(self, rollout_channel: Channel, num_envs):
        remaining, losses = EPISODES * num_envs, []
        while remaining:
            batch = rollout_channel.get_batch(target_weight=2 * SLOTS)
            remaining -= len(batch)
            actions = torch.cat([item["actions"] for item in batch])
            rewards = torch.cat([item["rewards"] for item in batch])
            log_probs = torch.log_softmax(self.logits, 0)[actions]
            loss = -((rewards - rewards.mean()) * log_probs).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss))
        self.log_on_first_rank(f"{len(losses)} updates")
        return sum(losses) / len(losses)


class BanditRunner:
    def __init__(self, env, rollout, learner, num_envs):
        self.env, self.rollout, self.learner, self.num_envs = env, rollout, learner, num_envs
        self.obs_channel = Channel.create("Observations")
        self.action_channel = Channel.create("Actions")
        self.rollout_channel = Channel.create("Rollouts", maxsize=64)

    def update_rollout_weights(self):
        handles = self.learner.send_weights("RolloutGroup"), self.rollout.sync_weights("LearnerGroup")
        for handle in handles:
            handle.wait()

    def run(self, steps):
        rewards = []
        for _ in range(steps):
            self.update_rollout_weights()
            env = self.env.interact(self.obs_channel, self.action_channel, self.rollout_channel)
            rollout = self.rollout.generate(self.obs_channel, self.action_channel, self.num_envs)
            learner = self.learner.run_training(self.rollout_channel, self.num_envs)
            rewards.append(sum(env.wait()) / self.num_envs)
            rollout.wait()
            learner.wait()
            durations, per_rank = env.consume_durations(return_per_rank=True)
            assert 0 <= durations["env/wait"] <= durations["env/interact"] and len(per_rank) == self.num_envs
            assert rollout.consume_durations(reduction_type="mean")["rollout/generate"] > 0
        assert self.rollout_channel.empty() and self.obs_channel.qsize(key="obs") == 0
        return rewards


def main():
    cluster, num_envs = Cluster(num_nodes=1), 2
    env = EnvWorker.create_group([0.0, 0.2, 1.0]).launch(
        cluster, placement_strategy=NodePlacementStrategy([0] * num_envs), name="EnvGroup"
    )
    rollout = RolloutWorker.create_group(seed=1).launch(
        cluster, placement_strategy=NodePlacementStrategy([0]), name="RolloutGroup"
    )
    learner = LearnerWorker.create_group(lr=2.0).launch(
        cluster, placement_strategy=NodePlacementStrategy([0]), name="LearnerGroup"
    )
    rewards = BanditRunner(env, rollout, learner, num_envs).run(steps=12)
    assert rewards[-1] > 0.8 > rewards[0], rewards
    print("learned")


if __name__ == "__main__":
    main()
