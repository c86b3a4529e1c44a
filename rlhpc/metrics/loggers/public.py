"""What of a configuration may leave the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HIDDEN = "***"
#: Whole words of a key, so that `max_new_tokens` and `token_level` are none.
_SECRET_KEY = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|passphrase|credentials?|authorization|cookie|api_?key|access_?key|"
    r"private_?key|auth)$",
    re.IGNORECASE,
)
#: All that lies below such a key.
_SECRET_SECTION = re.compile(r"^(headers|env|environ|environment|secrets|cookies)$", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"(\w+://)[^/\s@]+@")
_SECRET_IN_URL = re.compile(r"([?&](?:\w*token|\w*key|password|secret)=)[^&\s]+", re.IGNORECASE)


def public_config(raw: Any, resolved: Any) -> Any:
    """A configuration without secrets.

    Hidden are texts whose key says that they are secret, all texts below `headers` and the like, and user names and
    keys within addresses. What comes from the environment stays `${oc.env:NAME}`.

    Args:
        raw: Nested containers as written, interpolations unresolved.
        resolved: The same, resolved.
    """
    return _public("", raw, resolved, hidden=False)


def _public(key: str, raw: Any, value: Any, *, hidden: bool) -> Any:
    if isinstance(raw, str) and "${oc.env:" in raw:
        return raw
    if isinstance(value, Mapping):
        below = raw if isinstance(raw, Mapping) else value
        inside = hidden or bool(_SECRET_SECTION.match(key))
        return {str(k): _public(str(k), below.get(k, v), v, hidden=inside) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = raw if isinstance(raw, (list, tuple)) and len(raw) == len(value) else value
        return [_public(key, items[i], v, hidden=hidden) for i, v in enumerate(value)]
    if isinstance(value, str):
        if value and (hidden or _SECRET_KEY.search(key)):
            return _HIDDEN
        return _SECRET_IN_URL.sub(rf"\1{_HIDDEN}", _LOGIN_IN_URL.sub(rf"\1{_HIDDEN}@", value))
    return value


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists stay whole."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out
