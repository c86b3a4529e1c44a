"""Redaction of secrets, home folders and accounts in files that leave the user's machines.

A secret is recognised by its value (from the environment, from files with credentials, or given by the caller), by its form
(keys of known services, private keys, logins in addresses), or by the name to which it is assigned.
"""

from __future__ import annotations

import base64
import json
import netrc
import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlhpc.runtime.files import open_file, read_file

#: Text in place of a secret, of an account on a host, and of a user's name in a path.
SECRET, ACCOUNT, USER = "<redacted>", "<account>", "<user>"
#: Minimum length of a secret; shorter values are numbers and words that occur in any text.
_MIN_LENGTH = 6
_WORDS = (
    r"(?:token|secret|password|passwd|passphrase|credentials?|authorization|cookie|auth|api_?key|access_?key|"
    r"private_?key)"
)
#: Keys that name a secret. The pattern matches complete words at the end, so not `max_new_tokens` and `token_level`.
_SECRET_KEY = re.compile(rf"(^|[_\-.]){_WORDS}$", re.IGNORECASE)
#: Keys of tokens that a tokenizer knows.
_VOCABULARY_KEY = re.compile(
    r"(eos|bos|pad|unk|sep|cls|mask|image|video|audio|start|end|stop|special|boi|eoi)_token$", re.I
)
#: Further names of environment variables that hold secrets.
_SECRET_VARIABLE = re.compile(r"(^|_)(KEY|PAT|PASS|PASSPHRASE)$", re.IGNORECASE)
_SECRET_SECTION = re.compile(r"^(headers|env|environ|environment|secrets|cookies)$", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"(\w{1,20}://)[^/\s@\"'<>]+@")
_SECRET_IN_URL = re.compile(r"([?&](?:\w*token|\w*key|password|secret)=)[^&\s\"'<>]+", re.IGNORECASE)
#: The same in programs, where a login or key may be a placeholder such as `{token}`.
_LOGIN_IN_CODE = re.compile(r"(\w{1,20}://)(?=[^/\s@]*[A-Za-z0-9_~-]{6})[\w.~+-]+(?::[\w.~+%-]+)?@(?=[A-Za-z0-9])")
_SECRET_IN_CODE = re.compile(
    r"([?&](?:\w*token|\w*key|password|secret)=)(?=[\w-]*\d)[\w-]{16,}(?![{$%])", re.IGNORECASE
)
#: Keys of services by their form, private keys, and headers, each with texts of which it has one: a search for a text is much
#: faster than one for a pattern.
_FORMS = (
    (("hf_",), r"\bhf_[A-Za-z0-9]{16,}"),
    (("api_org_",), r"\bapi_org_[A-Za-z0-9]{16,}"),
    (("sk-",), r"\bsk-[A-Za-z0-9_-]{16,}"),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    (("github_pat_",), r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    (("glpat-",), r"\bglpat-[A-Za-z0-9_-]{16,}"),
    (("xox",), r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    (("AKIA", "ASIA"), r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b"),
    (("AIza",), r"\bAIza[0-9A-Za-z_-]{30,}"),
    (("wandb_v",), r"\bwandb_v\d_[A-Za-z0-9_]{16,}"),
    (("eyJ",), r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"),
    (
        ("PRIVATE KEY",),
        r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[A-Za-z0-9+/=\s\\:,.-]{0,20000}?-----END [A-Z ]{0,30}PRIVATE KEY-----",
    ),
    (("earer",), r"\b[Bb]earer\s+(?=[^\s\"']*\d)[A-Za-z0-9._~+/=-]{16,}"),
    (("asic",), r"\b[Bb]asic\s+(?=[^\s\"']*\d)[A-Za-z0-9+/]{12,}={0,2}"),
)
_FORM_PATTERNS = [(hints, re.compile(form_pattern)) for hints, form_pattern in _FORMS]
#: Beginnings of the words of `_WORDS`, in lower case.
_WORD_HINTS = ("token", "secret", "pass", "credential", "authorization", "cookie", "key", "auth")
_FORM_BYTES = re.compile("|".join(form_pattern for _, form_pattern in _FORMS).encode())
_QUOTE = r"(?:\\?[\"']|&quot;|&#39;|&#x27;)"
#: Assignment of a quoted text, and of a bare word of letters and digits, to a name of a secret.
_QUOTED = re.compile(
    rf"(?<![A-Za-z])(?P<name>{_WORDS})(?P<to>{_QUOTE}?\s*[:=]\s*{_QUOTE})(?P<value>[^\s\"'<>\[{{$\\&][^\s\"'<>\\&]{{5,}})",
    re.I,
)
_BARE = re.compile(
    rf"(?<![A-Za-z])(?P<name>{_WORDS})(?P<to>{_QUOTE}?\s*[:=]\s*{_QUOTE}?)"
    r"(?P<value>(?=[A-Za-z_+/=.~-]*\d)(?=[\d_+/=.~-]*[A-Za-z])[A-Za-z0-9_+/=~-]{16,})(?=$|[\s\"',;&<\\)}\]])", re.I | re.M,
)  # fmt: skip
_ACCOUNT = re.compile(r"(?<![\w/.@+-])(?!git@)[A-Za-z_][\w.+-]*@[A-Za-z][\w-]+(?:\.[\w-]+)*")
_ACCOUNT_OF_COMMAND = re.compile(
    r"(\b(?:ssh|scp|sftp|sshfs|rsync|ssh-copy-id)\b[^\n]*?[\s\"'])(?!git@)[A-Za-z_][\w.+-]*@[\w.-]+"
)
_ANY_HOME = re.compile(r"(?<![\w~.-])(?:/[\w.-]+){0,3}?/(?:home|Users|users)\d*/[A-Za-z_][\w.-]*")
_HOME = r"(?<![\w.~-]){}(?![\w.-])"
#: Bytes of a binary file that are searched at a time, and bytes that two neighbouring parts share.
_PART, _OVERLAP = 1 << 22, 1 << 15


def is_secret_key(key: str) -> bool:
    """Returns whether a configuration key or a variable names a secret."""
    return bool(_SECRET_KEY.search(key)) and not _VOCABULARY_KEY.search(key)


def is_secret_section(key: str, *, is_top: bool = False) -> bool:
    """Returns whether all texts below a configuration key are secret, such as `headers`.

    Args:
        key: Last part of the key.
        is_top: Whether the key is a section of the configuration, where `env` is the simulator.
    """
    return bool(_SECRET_SECTION.match(key)) and not (is_top and key == "env")


def redact_addresses(log_text: str, mask: str) -> str:
    """Returns a text with `mask` in place of logins and keys in addresses."""
    return _SECRET_IN_URL.sub(rf"\1{mask}", _LOGIN_IN_URL.sub(rf"\1{mask}@", log_text))


class Redactor:
    """Redaction of texts, nested values and files of one user.

    Args:
        secrets: Values that must not leave the machine.
        homes: Home folders, which become `~`.
        users: Names of accounts, which become `<user>` in paths and in front of an `@`.

    Attributes:
        counts: Number of replacements by kind: secret, home, account.
    """

    def __init__(self, secrets: Iterable[str], homes: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self.counts = Counter[str]()
        secret_values = {secret_value for secret_value in secrets if len(secret_value) >= _MIN_LENGTH}
        variants = {variant for secret_value in secret_values for variant in _list_variants(secret_value)}
        self._secrets = _compile_alternatives(variants, "{}")
        self._secret_bytes = _compile_to_bytes(self._secrets)
        folders = {home.rstrip("/") for home in homes if home.startswith("/") and len(home.rstrip("/")) > 2}
        self._homes = _compile_alternatives(folders, _HOME)
        # Programs name the home of root as a system folder.
        self._personal_homes = _compile_alternatives(folders - {"/root"}, _HOME)
        self._home_bytes = _compile_to_bytes(_compile_alternatives(folders, r"(?<![\w.~-]){}/"))
        self._users = _compile_alternatives(
            {name for name in users if _is_personal(name)}, r"(?:(?<=/){0}(?=/|$|[\s\"':,])|(?<![\w.-]){0}(?=@))"
        )

    @classmethod
    def of_user(cls, secrets: Iterable[str] = ()) -> Redactor:
        """Returns the redactor of this process's user.

        Args:
            secrets: Values to redact in addition to those of the environment and of files with credentials.
        """
        variable_values = [
            variable_value
            for name, variable_value in os.environ.items()
            if is_secret_key(name) or _SECRET_VARIABLE.search(name)
        ]  # fmt: skip
        homes, users = {os.environ.get("HOME", "")}, {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
        try:
            account = pwd.getpwuid(os.getuid())
            homes.add(account.pw_dir)
            users.add(account.pw_name)
        except KeyError:  # an account without a name
            pass
        homes |= {os.path.realpath(home) for home in homes if home.startswith("/")}
        return cls([*variable_values, *_read_stored_credentials(), *secrets], homes, users)

    def text(self, text: str, *, is_code: bool = False) -> str:
        """Returns a redacted text.

        Args:
            text: The text.
            is_code: Whether the text is a program or a difference between programs. Then only what is certain is replaced, so
                that the program still runs: an `@` between names may be a product of matrices.
        """
        if self._secrets:
            text = self._replace(self._secrets, SECRET, text, "secret")
        for hints, pattern in _FORM_PATTERNS:
            if any(hint in text for hint in hints):
                text = self._replace(pattern, SECRET, text, "secret")
        if "://" in text:
            text = self._replace(_LOGIN_IN_CODE if is_code else _LOGIN_IN_URL, rf"\1{SECRET}@", text, "secret")
        if "=" in text:
            text = self._replace(_SECRET_IN_CODE if is_code else _SECRET_IN_URL, rf"\1{SECRET}", text, "secret")
        lower_text = text.lower()
        if any(hint in lower_text for hint in _WORD_HINTS):
            for pattern in (_BARE,) if is_code else (_BARE, _QUOTED):
                text = pattern.sub(self._redact_assigned, text)
        homes = self._personal_homes if is_code else self._homes
        if homes:
            text = self._replace(homes, "~", text, "home")
        if not is_code and any(hint in text for hint in ("/home", "/Users", "/users")):
            text = self._replace(_ANY_HOME, "~", text, "home")
        if "@" in text:
            text = self._replace(_ACCOUNT_OF_COMMAND, rf"\1{ACCOUNT}", text, "account")
            text = text if is_code else self._replace(_ACCOUNT, ACCOUNT, text, "account")
        return self._replace(self._users, USER, text, "account") if self._users else text

    def value(self, value: Any) -> Any:
        """Returns nested containers with redacted texts; texts whose key names a secret are replaced as a whole."""
        return self._value(value, "", depth=None, hidden=False)

    def config(self, config: Mapping[str, Any]) -> Any:
        """Returns a configuration with redacted texts; all texts below sections such as `headers` are replaced as well."""
        return self._value(config, "", depth=0, hidden=False)

    def _value(self, value: Any, key: str, *, depth: int | None, hidden: bool) -> Any:
        if isinstance(value, Mapping):
            is_hidden = hidden or (depth is not None and is_secret_section(key, is_top=depth == 1))
            nested_depth = None if depth is None else depth + 1
            return {
                self.text(name) if isinstance(name, str) else name:
                    self._value(child, str(name), depth=nested_depth, hidden=is_hidden)
                for name, child in value.items()
            }  # fmt: skip
        if isinstance(value, (list, tuple)):
            return [self._value(child, key, depth=depth, hidden=hidden) for child in value]
        if not isinstance(value, str):
            return value
        if value and not value.startswith("${oc.env:") and (hidden or is_secret_key(key)):
            self.counts["secret"] += 1
            return SECRET
        return self.text(value)

    def find_in_binary(self, path: Path) -> str:
        """Returns the kind of private data in a binary file, such as `a secret`; "" for a file without private data."""
        with open_file(path) as file:
            end_of_last = b""
            while file_part := file.read(_PART):
                searched_bytes = end_of_last + file_part
                if (self._secret_bytes and self._secret_bytes.search(searched_bytes)) or _FORM_BYTES.search(
                    searched_bytes
                ):
                    return "a secret"
                if self._home_bytes and self._home_bytes.search(searched_bytes):
                    return "the path of a home folder"
                end_of_last = searched_bytes[-_OVERLAP:]
        return ""

    def _redact_assigned(self, assigned_match: re.Match[str]) -> str:
        # The whole name is looked at here, and not by the pattern, which would take quadratic time on long words.
        preceding_text = assigned_match.string[max(assigned_match.start() - 20, 0) : assigned_match.start()]
        if _VOCABULARY_KEY.search(preceding_text + assigned_match["name"]) or assigned_match["value"] in (
            SECRET,
            ACCOUNT,
        ):
            return assigned_match[0]
        self.counts["secret"] += 1
        return f"{assigned_match['name']}{assigned_match['to']}{SECRET}"

    def _replace(self, pattern: re.Pattern[str], replacement: str, text: str, kind: str) -> str:
        redacted_text, num_replaced = pattern.subn(replacement, text)
        if num_replaced:
            self.counts[kind] += num_replaced
        return redacted_text


def secret_values(data: Any, *, is_config: bool) -> list[str]:
    """Returns the texts in nested containers whose keys name secrets.

    Args:
        data: The containers.
        is_config: Whether they are a configuration, in which all texts below sections such as `headers` are secret.
    """
    return _collect_secret_values(data, "", depth=0 if is_config else None, hidden=False)


def _collect_secret_values(data: Any, key: str, *, depth: int | None, hidden: bool) -> list[str]:
    if isinstance(data, Mapping):
        is_hidden = hidden or (depth is not None and is_secret_section(key, is_top=depth == 1))
        nested_depth = None if depth is None else depth + 1
        children = [
            _collect_secret_values(child, str(name), depth=nested_depth, hidden=is_hidden)
            for name, child in data.items()
        ]
        return [child_text for child_texts in children for child_text in child_texts]
    if isinstance(data, (list, tuple)):
        return [
            child_text
            for child in data
            for child_text in _collect_secret_values(child, key, depth=depth, hidden=hidden)
        ]
    is_secret = isinstance(data, str) and (hidden or is_secret_key(key)) and not data.startswith("${")
    return [data] if is_secret else []


def _list_variants(secret_value: str) -> set[str]:
    """Returns a secret as addresses, JSON and HTTP headers write it."""
    encoded_secret = base64.b64encode(secret_value.encode(errors="surrogateescape")).decode().rstrip("=")
    return {secret_value, quote(secret_value, safe=""), json.dumps(secret_value)[1:-1], encoded_secret}


def _compile_alternatives(secret_forms: Iterable[str], template: str) -> re.Pattern[str] | None:
    """Returns a pattern of these values, the longest first; None without values."""
    pattern = "|".join(
        re.escape(secret_form)
        for secret_form in sorted(secret_forms, key=lambda secret_form: (-len(secret_form), secret_form))
    )
    return re.compile(template.replace("{0}", "{}").replace("{}", f"(?:{pattern})")) if pattern else None


def _compile_to_bytes(pattern: re.Pattern[str] | None) -> re.Pattern[bytes] | None:
    return re.compile(pattern.pattern.encode(errors="surrogateescape")) if pattern else None


def _is_personal(name: str) -> bool:
    return len(name) > 1 and not name.isdigit() and name not in ("root", "user", "runner")


def _read_stored_credentials() -> list[str]:
    """Returns the secrets in files in which programs keep them: the token of the Hugging Face hub, and passwords of hosts."""
    home = Path(os.environ.get("HOME") or "/nonexistent")
    hub_home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    )
    credential_values = []
    for path in (Path(os.environ.get("HF_TOKEN_PATH") or hub_home / "token"), home / ".huggingface" / "token"):
        try:
            credential_values.append(read_file(path, 1 << 16).decode().strip())
        except (OSError, ValueError):
            continue
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or home / ".netrc").hosts
    except (OSError, ValueError, netrc.NetrcParseError):
        hosts = {}
    return [*credential_values, *(password for _, _, password in hosts.values() if password)]
