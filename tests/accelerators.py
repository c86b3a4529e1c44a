"""Where tests compute, and the lists of what only an accelerator, or only the CPU, can show; a plugin of pytest.

`RLHPC_TEST_DEVICE` says where: `cpu`, or with any other word this machine's accelerators. Without it, tests marked `gpu` take
these, and all others the CPU. With `cpu`, those marked `gpu` show that they run; with another word, the tests of some files
that are not marked take accelerators, too, and `-m gpu` takes them. No test marked `gpu` may be skipped for another reason
than the lists' here, or than too few accelerators.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc import Cluster, NodePlacementStrategy, PackedPlacementStrategy

GIVEN = os.environ.get("RLHPC_TEST_DEVICE", "")
#: Of tests marked `gpu`.
ON_CPU = GIVEN == "cpu"
#: Of the others: whether they compute on the accelerator because somebody asked for it.
OTHERS_ON_CARD = GIVEN not in ("", "cpu")
#: Whether the accelerator is that of `tests.card`, which needs no memory for itself, and is slow.
STAND_IN = GIVEN == "card"

#: Tests marked `gpu` that the CPU cannot run, and why.
ONLY_ON_A_CARD = {
    "test_the_second_model_runner_writes": "vLLM's CPU build has no second model runner",
    "test_sleep_gives_the_memory_back": "vLLM's CPU build has no sleep mode",
    "test_each_rank_sees_its_own_card": "a CPU has no mask",
}
#: Those that take two accelerators; on the CPU two ranks do.
TWO_CARDS = (
    "test_collectives_and_messages",
    "test_shards_on_two_train_as_one",
    "test_each_rank_sees_its_own_card",
    "test_weights_go_from_one_accelerator_to_the_other",
)
#: Tests of the files below that say nothing of an accelerator, and why.
ONLY_ON_THE_CPU = {
    "test_a_checkpoint_of_an_accelerator_goes_on_where_there_is_none": "is about a machine without one",
    "test_out_of_memory_names_the_knobs": "exhausts the host's memory",
    "test_vllm_says_what_it_lacks": "is about the CPU build",
    "test_neighbours_do_not_matter": "kernels add in another order in batches of another size, which decides near ties",
    "test_greedy_tokens_are_those_of_transformers_generate": "kernels add in another order than the CPU's, as above",
    "test_engines_agree": "two engines' kernels add in different orders, as above",
    "test_offload_loses_no_request": "what is recomputed is added in another order, as above",
}
#: What else the accelerator of `tests.card` cannot show, by parts of the tests' names, and why.
NOT_ON_THE_STAND_IN = {
    "test_deepspeed.py": "DeepSpeed has no class for it",
    "[zero ": "DeepSpeed has no class for it",
    "deepspeed": "DeepSpeed has no class for it",
    "vllm": "vLLM has no kernels for it",
    "test_an_engine_that_awaits_all_weights_reads_no_file": "vLLM has no kernels for it",
    "test_what_gets_lost_in_half_precision_is_noticed": "vLLM has no kernels for it",
    "test_experts_whose_updates_nobody_has_compared_are_refused": "vLLM has no kernels for it",
    "test_engine_accelerator.py": "vLLM has no kernels for it",
    "test_maniskill_accelerator.py": "its simulation is CUDA's",
    "test_what_is_written_late_arrives": "its memory cannot be mapped into another process",
    "test_observations_of_a_run_stay_on_it": "as above",
    "test_the_kernel_knows_the_devices_of_this_machine": "it is on no bus",
}
#: Files of tests that are not marked, and compute on the accelerator where somebody asks for it. `-m gpu` takes them then.
ASKED = (
    "integration/language/test_training_backends.py",
    "integration/language/test_deepspeed.py",
    "integration/language/test_parking.py",
    "integration/language/test_rollout_backends.py",
    "integration/language/test_weight_sync.py",
    "unit/weights/test_reshard.py",
    "unit/language/models/test_token_scores.py",
)


def kind() -> str:
    """Torch's word for where tests marked `gpu` compute."""
    if ON_CPU:
        return "cpu"
    from rlhpc.runtime.devices import accelerator

    return accelerator()


def kind_of_others() -> str:
    """The same, of the other tests."""
    return kind() if OTHERS_ON_CARD else "cpu"


def cards() -> int:
    """How many accelerators there are for tests marked `gpu`."""
    import torch

    return torch.accelerator.device_count() if not ON_CPU and kind() else 0


def cluster_of(ranks: int, on_card: bool = not ON_CPU) -> Cluster:
    """This machine with an accelerator for each of so many ranks, or with none."""
    return Cluster({"accelerators_per_node": ranks}) if on_card else Cluster.local(num_nodes=1, accelerators_per_node=0)


def placed(ranks: int, on_card: bool = not ON_CPU) -> Any:
    """So many ranks, each on an accelerator of its own, or on the CPU."""
    return PackedPlacementStrategy(0, ranks - 1) if on_card else NodePlacementStrategy([0] * ranks)


def loose(tolerance: float, on_card: float = 2e-3) -> float:
    """A tolerance of float32 on the CPU, where unmarked tests compute there; accelerators' kernels round otherwise."""
    return max(tolerance, on_card) if OTHERS_ON_CARD else tolerance


def same(one: Any, other: Any) -> bool:
    """Whether two tensors have the same bits; on an accelerator, whose sums are not the same each time, nearly."""
    import torch

    return torch.allclose(one, other, rtol=loose(0), atol=loose(0)) if OTHERS_ON_CARD else torch.equal(one, other)


def need(count: int) -> None:
    """Skips an unmarked test where it is to compute on more accelerators than there are."""
    if OTHERS_ON_CARD and cards() < count:
        pytest.skip(f"needs {count} accelerators")


def skipped_for(name: str, whole: str = "") -> str:
    """Why a test marked `gpu` cannot run here; empty if it can.

    Args:
        name: Its function's.
        whole: With its file and parameters.
    """
    for part, why in NOT_ON_THE_STAND_IN.items() if STAND_IN else ():
        if part in whole:
            return why
    if ON_CPU:
        return ONLY_ON_A_CARD.get(name, "")
    if OTHERS_ON_CARD and name in ONLY_ON_THE_CPU:
        return ONLY_ON_THE_CPU[name]
    if not cards():
        return "torch finds no accelerator here; RLHPC_TEST_DEVICE=cpu shows without one that they run"
    return "needs 2 accelerators" if name in TWO_CARDS and cards() < 2 else ""


def _name(item: pytest.Item) -> str:
    return item.originalname if isinstance(item, pytest.Function) else item.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if OTHERS_ON_CARD:
        asked = {Path(__file__).parent / name for name in ASKED}
        for item in items:
            if item.path in asked:
                item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (why := skipped_for(_name(item), item.nodeid)):
        pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """A test marked `gpu` that skips itself would look like one that passed."""
    report: Any = yield
    if report.skipped and item.get_closest_marker("gpu") and not _named(item, str(report.longrepr)):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, but ONLY_ON_A_CARD in tests/accelerators.py does not name it"
    return report


def _named(item: pytest.Item, why: str) -> bool:
    return bool(skipped_for(_name(item), item.nodeid) or re.search(r"needs \d+ accelerators", why))
