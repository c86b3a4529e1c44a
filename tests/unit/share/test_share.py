"""What belongs to rlhpc beside its code is found in a checkout and in an installation."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc import share


def test_a_checkout_has_all_that_a_wheel_carries() -> None:
    assert [name for name in share.FOLDERS if not share.path(name).is_dir()] == []
    assert Path(share.snakefile()).is_file()


def test_a_folder_of_that_name_beside_the_package_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, beside = tmp_path / "site-packages" / "rlhpc" / "share", tmp_path / "site-packages" / "workflow"
    for folder in (packaged / "workflow", beside):
        folder.mkdir(parents=True)
        (folder / "Snakefile").touch()
    monkeypatch.setattr(share, "_PACKAGED", packaged)
    assert share.snakefile() == str(packaged / "workflow" / "Snakefile")
