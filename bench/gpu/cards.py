"""Benchmark on two cards: collectives between them, a model on both, and the visibility of each rank's own card."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.gpu.part import Report, make_model, size_for
from bench.gpu.ranks import Linked, launch_groups
from bench.gpu.training import BACKENDS, report_backend, train
from rlhpc import Cluster, FlexiblePlacementStrategy, Session
from rlhpc.runtime.errors import RlhpcError


def try_one_card(report: Report) -> None:
    """Records whether two ranks of NCCL work on one card."""
    name = "NCCL with two ranks on one card"
    group = Linked.create_group()
    try:
        cluster = Cluster({"accelerators_per_node": 1})
        group.launch(cluster, FlexiblePlacementStrategy([[0], [0]]), name="together")
        group.collectives(1000, 1).wait(60)
    except RlhpcError as error:
        report.skip(name, f"it is refused: {str(error).splitlines()[0][:300]}")
    else:
        report.figure(name, 1, "works")
    finally:
        group.shutdown()
        if session := Session.running():
            session.stop()


def measure(report: Report) -> None:
    """Measures between two ranks: by NCCL on two cards, by gloo on a CPU. Skips the measurements on a single card."""
    if report.cards == 1:
        try_one_card(report)
        for figure_name in ("NCCL", "FSDP2 on two cards", "device masks"):
            report.skip(figure_name, "one card")
        return
    library = "gloo" if report.small else "NCCL"
    elements = 4_000_000 if report.small else 250_000_000
    with report.piece(library), launch_groups(report.device, (Linked, "linked", [0, 1])) as (group,):
        for name, seconds in group.collectives(elements, 3).wait()[1].items():
            report.figure(
                f"{library}, {name}" if name[0] != "r" else name, [4 * elements / s / 1e9 for s in seconds], "GB/s"
            )
        if report.small:
            report.skip("device masks", "a CPU has none")
        else:
            masks, visible, card_ids = zip(*group.visible_cards().wait(), strict=True)
            if visible != (1, 1) or len(set(card_ids)) < 2:
                raise RuntimeError(f"ranks with the masks {masks} see {visible} cards: {card_ids}")
            report.figure("cards that each rank sees", 1, "")
    with report.piece("FSDP2 on two"), tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), size_for(report.device), report.device)
        one_rank, two_ranks = (train(report, Path(folder), BACKENDS["FSDP2"], ranks) for ranks in (1, 2))
        report_backend(report, "FSDP2 on two ranks", two_ranks)
        report.figure(
            "FSDP2 on two ranks, faster than on one", min(one_rank["seconds"]) / min(two_ranks["seconds"]), "times"
        )
        report.figure(
            "FSDP2 on two ranks, log-probs apart", float((two_ranks["probe"] - one_rank["probe"]).abs().mean()), "nats"
        )
