"""Reader of DeepSpeed's checkpoint files: full parameters of each stage, and files that are none."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.runtime.errors import CheckpointError
from rlhpc.training import deepspeed_checkpoint
from rlhpc.training.deepspeed_checkpoint import convert_to_universal, files_of, full_parameters, require_harmless

SHAPES = [{"a": torch.Size((2, 3)), "b": torch.Size((4,))}, {"c": torch.Size((5,))}]
FULL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(10.0, 14.0), "c": torch.arange(20.0, 25.0)}


def fragment(start: int, numel: int) -> Any:
    """Returns the position of a rank's part, as DeepSpeed pickles it."""
    part = deepspeed_checkpoint._Fragment()
    part.numel, part.start = numel, start
    return part


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets files name the stand-ins of DeepSpeed's classes themselves, so that writing them needs no DeepSpeed."""
    standins = deepspeed_checkpoint._STANDINS.values()
    names = {f"{standin.__module__}.{standin.__qualname__}": standin for standin in standins}
    monkeypatch.setattr(deepspeed_checkpoint, "_STANDINS", names)


def write_stage_3(folder: Path, ranks: int) -> None:
    """Writes the files of ZeRO stage 3: each group's parameters are cut into equal, padded parts."""
    for rank in range(ranks):
        groups = []
        for members in SHAPES:
            parts = []
            for name in members:
                flat, share = FULL[name].flatten(), -(-FULL[name].numel() // ranks)
                padded = torch.cat([flat, flat.new_zeros(share * ranks - flat.numel())])
                parts.append(padded[rank * share : (rank + 1) * share])
            groups.append(torch.cat(parts))
        state = {"fp32_flat_groups": groups, "partition_count": ranks}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save({"param_shapes": SHAPES}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def write_stage_2(folder: Path) -> None:
    """Writes the files of ZeRO stage 2 with two ranks: each group is one flat tensor, cut anywhere."""
    cuts = [7, 2]  # of the first group's ten elements, and of the second's five
    flats = [torch.cat([FULL["a"].flatten(), FULL["b"]]), FULL["c"]]
    mappings: list[list[dict[str, Any]]] = [
        [{"a": fragment(0, 6), "b": fragment(6, 1)}, {"c": fragment(0, 2)}],
        [{"b": fragment(0, 3)}, {"c": fragment(0, 3)}],
    ]
    for rank in range(2):
        parts = [flat[:cut] if rank == 0 else flat[cut:] for flat, cut in zip(flats, cuts, strict=True)]
        state = {
            "single_partition_of_fp32_groups": parts, "param_slice_mappings": mappings[rank], "partition_count": [2, 2],
        }  # fmt: skip
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": SHAPES}, folder / "mp_rank_00_model_states.pt")


def assert_full(folder: Path) -> None:
    """Checks that the files have the parameters."""
    parameters = dict(full_parameters(folder))
    assert set(parameters) == set(FULL)
    for name, tensor in FULL.items():
        assert torch.equal(parameters[name], tensor), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parameters_of_stage_3_are_put_together(tmp_path: Path, ranks: int) -> None:
    write_stage_3(tmp_path, ranks)
    assert_full(tmp_path)
    assert [path.name for path in files_of(tmp_path, 0)] == [
        "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ]  # fmt: skip


def test_parameters_of_stage_2_are_put_together(tmp_path: Path, own_names: None) -> None:
    write_stage_2(tmp_path)
    assert_full(tmp_path)
    assert "mp_rank_00_model_states.pt" in [path.name for path in files_of(tmp_path, 1)]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="so it is no DeepSpeed checkpoint"):
        list(full_parameters(tmp_path))
    write_stage_3(tmp_path, 3)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has files of 2 ranks, of 3 that there were"):
        list(full_parameters(tmp_path))


def test_a_parameter_of_which_a_part_is_missing_is_named(tmp_path: Path, own_names: None) -> None:
    write_stage_2(tmp_path)
    path = tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = {"single_partition_of_fp32_groups": [torch.zeros(0)] * 2, "param_slice_mappings": [{}, {}]}
    torch.save({"optimizer_state_dict": state}, path)
    with pytest.raises(CheckpointError, match="b: the files hold 1 of its 4 elements"):
        list(full_parameters(tmp_path))


def test_a_file_that_would_call_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": os.getcwd}, path)
    with pytest.raises(CheckpointError, match=r"loading it would call posix\.getcwd"):
        list(full_parameters(tmp_path))
    path.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        require_harmless([path])


class Ranks:
    """The ranks of a conversion, of which this is one."""

    def __init__(self, rank: int, reports: list[Any]) -> None:
        self.rank, self.reports, self.waited = rank, reports, 0

    def all_gather_object(self, report: Any) -> list[Any]:
        if self.rank == 0:
            self.reports.append(report)
        return self.reports

    def barrier(self) -> None:
        self.waited += 1


def test_rank_0_converts_for_all_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def converter(options: Any) -> None:
        calls.append(options)
        Path(options.output_folder).joinpath("done").touch()
        print("noise")

    module = SimpleNamespace(main=converter)
    monkeypatch.setattr(deepspeed_checkpoint.importlib, "import_module", lambda name: module)
    source = tmp_path / "tag"
    source.mkdir()
    reports: list[Any] = []
    ranks: Any = Ranks(0, reports)
    with convert_to_universal(source, neighbour=tmp_path / "global_step_1", worker=ranks) as folder:
        assert (folder / "tag" / "done").exists() and folder.parent == tmp_path
        assert folder.name.startswith(".tmp_global_step_1-")
        other: Any = Ranks(1, reports)
        with convert_to_universal(source, neighbour=tmp_path / "global_step_1", worker=other) as same:
            assert same == folder
        assert folder.exists() and len(calls) == 1
    assert not folder.exists() and ranks.waited == 1


def test_all_ranks_hear_that_the_conversion_failed(tmp_path: Path) -> None:
    source = tmp_path / "tag"
    source.mkdir()
    (source / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"torn")
    reports: list[Any] = []
    for rank in range(2):
        ranks: Any = Ranks(rank, reports)
        with (
            pytest.raises(CheckpointError, match="could not be converted for another number of ranks: CheckpointError"),
            convert_to_universal(source, neighbour=tmp_path / "global_step_1", worker=ranks),
        ):
            pass
    assert not list(tmp_path.glob(".tmp_*"))
