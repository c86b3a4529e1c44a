"""A turn tree that is shown pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image


def picture(width: int = 2, height: int = 2, shade: int = 0) -> str:
    """In base64."""
    file = io.BytesIO()
    Image.new("L", (width, height), shade).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def by_url(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
