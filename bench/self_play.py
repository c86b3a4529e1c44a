"""Games with known optimal play, learnt from scratch in full runs: Kuhn poker by self-play, and guessing a number.

    python -m bench.self_play --seeds 3

Kuhn poker: the evaluated policy is the average of the policies at the checkpoints of the second half of the run, at
temperature 1 and including invalid moves. The exploitability of this policy is computed exactly over all twelve situations.
Guessing: the figure is the share of games in which the number is found within the turns, compared with the best player.

Prints a line for each game and seed and writes bench/results/self_play.json. Fails if the average policy can be exploited by
more than 0.25 a game, or wins less against a player with equal probabilities of pass and bet than the equilibria do. The
equilibria win 0.11 to 0.17 a game, depending on how often the first player bluffs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.demo_agent import ROOT, read_curve, run_rlhpc
from bench.machine import write
from rlhpc.language.envs import games as kuhn
from rlhpc.language.envs.games import Guess

KUHN, GUESS = "configs/agents/kuhn_poker.yaml", "configs/agents/guess.yaml"
MAX_EXPLOITABILITY = 0.25


@torch.no_grad()
def read_policy(checkpoint: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns a checkpoint's policy: the probabilities of a pass and a bet, by card and previous moves."""
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint / "model"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(checkpoint / "model"))).eval()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    pass_id, bet_id = (tokenizer.convert_tokens_to_ids(move) for move in "pb")
    chances_by_state = {}
    for moves, seat in kuhn.TURNS.items():
        for card in kuhn.CARDS:
            is_second_turn = moves == "pb"  # it was asked before, and knows its card from there
            messages = [{"role": "user", "content": f"{seat + 1}{card}{'' if is_second_turn else moves}"}]
            if is_second_turn:
                messages += [{"role": "assistant", "content": "p"}, {"role": "user", "content": "b"}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            probabilities = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
            chances_by_state[card, moves] = float(probabilities[pass_id]), float(probabilities[bet_id])
    return chances_by_state


def run_kuhn_poker(seed: int, runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs self-play at one seed."""
    start_time, name = time.perf_counter(), f"kuhn-{seed}"
    run_overrides = [
        f"runner.run_dir={runs}",
        f"runner.name={name}",
        f"runner.seed={seed}",
        "runner.keep_checkpoints=0",
    ]
    run_rlhpc("train", KUHN, *run_overrides, *overrides)
    folders = (runs / name / "checkpoints").glob("global_step_*")
    steps = sorted(folders, key=lambda path: int(path.name.rpartition("_")[2]))
    policies = [read_policy(folder) for folder in steps]
    average_policy = kuhn.average(policies[len(policies) // 2 :])
    last_return = {
        "exploitability": kuhn.exploitability(policies[-1]),
        "against_uniform": kuhn.against(policies[-1], kuhn.uniform()),
    }
    rounded_policy = {
        f"{card} {moves}".strip(): [round(chance, 3) for chance in probabilities]
        for (card, moves), probabilities in average_policy.items()
    }
    return {
        "seed": seed,
        "exploitability": kuhn.exploitability(average_policy),
        "against_uniform": kuhn.against(average_policy, kuhn.uniform()),
        "last": last_return,
        "curve": [round(kuhn.exploitability(policy), 4) for policy in policies],
        "policy": rounded_policy,
        "seconds": time.perf_counter() - start_time,
    }  # fmt: skip


def run_guess(seed: int, runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs the guessing game at one seed; returns a row with the share of guessed numbers over the last 20 steps."""
    start_time, name = time.perf_counter(), f"guess-{seed}"
    run_rlhpc("train", GUESS, f"runner.run_dir={runs}", f"runner.name={name}", f"runner.seed={seed}", *overrides)
    found_shares = read_curve(runs / name)
    last_shares = found_shares[-20:]
    return {
        "seed": seed,
        "found": sum(last_shares) / len(last_shares),
        "curve": found_shares,
        "seconds": time.perf_counter() - start_time,
    }


def main() -> int:
    """Runs both games at all seeds; returns 1 if self-play misses its criterion, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("overrides", nargs="*", help="key=value, of both games")
    args = parser.parse_args()
    runs, poker, guess_rows = args.runs.absolute(), list[dict[str, Any]](), list[dict[str, Any]]()
    game_options = {"high": 15, "turns": 4}
    optimal_play = Guess.optimum(**game_options)
    for seed in range(1, args.seeds + 1):
        row = run_kuhn_poker(seed, runs, args.overrides)
        poker.append(row)
        print(
            f"Kuhn poker, seed {seed}: exploitability {row['exploitability']:.3f}, {row['against_uniform']:+.3f} a game of "
            f"uniform play; {row['seconds']:.0f} s",
            flush=True,
        )
        row = run_guess(seed, runs, args.overrides)
        guess_rows.append(row)
        print(f"guess, seed {seed}: {row['found']:.1%}, best {optimal_play:.0%}; {row['seconds']:.0f} s", flush=True)
    low_return, high_return = (kuhn.against(kuhn.equilibrium(bluff), kuhn.uniform()) for bluff in (0.0, 1 / 3))
    uniform = {
        "exploitability": kuhn.exploitability(kuhn.uniform()),
        "value": kuhn.value(kuhn.equilibrium(), kuhn.equilibrium()),
        "won_by_equilibria": [low_return, high_return],
    }
    content = {
        "kuhn_poker": poker,
        "guess": guess_rows,
        "known": {"uniform": uniform, "guess": {**game_options, "best": optimal_play}},
    }
    write("self_play", f"python -m bench.self_play --seeds {args.seeds}", content)
    failed_seeds = [
        row["seed"]
        for row in poker
        if row["exploitability"] > MAX_EXPLOITABILITY or row["against_uniform"] < low_return
    ]
    for seed in failed_seeds:
        print(f"Kuhn poker, seed {seed} fell short", file=sys.stderr)
    return int(bool(failed_seeds))


if __name__ == "__main__":
    raise SystemExit(main())
