"""Pictures of rows."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from rlhpc.config.typed import untouched
from rlhpc.language.config.run import SftConfig
from rlhpc.language.data.registry import make_dataset
from rlhpc.runtime.errors import ConfigError


def test_one_question_about_many_pictures_is_held_out_by_picture(tmp_path: Path) -> None:
    """Both sides have some; and the same picture by another row is on the same one."""
    urls = []
    for shade in range(20):
        Image.new("L", (2, 2), shade).save(file := io.BytesIO(), "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    rows = [json.dumps({"prompt": "how many?", "answer": "", "shown": url}) for url in [*urls, *urls]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    section = untouched(SftConfig).data.train
    section.path, section.images_key, section.eval_fraction = str(tmp_path / "rows.jsonl"), "shown", 0.5
    sides = [make_dataset(section, part) for part in ("train", "eval")]
    train, held = ([data[n].images for n in range(len(data))] for data in sides)
    assert train and held and not {*train} & {*held} and len(train) + len(held) == 40
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "how many?", "answer": "", "shown": urls[0][:60]}))
    with pytest.raises(ConfigError, match="column 'shown': a picture"):
        make_dataset(section)
