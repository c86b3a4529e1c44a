"""How a problem is worded: the template around the question, and the system prompt before the conversation."""

from __future__ import annotations

import dataclasses
import re

from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError

_FIELD = re.compile(r"\{(\w+)\}")


class Wording:
    """Puts the last user message (or raw text) into a template, and a system message first.

    `{prompt}` in the template is the question, and `{name}` whatever the problem's `meta` has under that name, such as
    another column of its file. All other braces are text: `\\boxed{}` needs no escape.

    Args:
        template: `data.….prompt_template`.
        system_prompt: `data.….system_prompt`; takes the place of a conversation's own system message.
        key: What messages call the section.

    Raises:
        ConfigError: The template has no place for the question.
    """

    def __init__(
        self, template: str = "{prompt}", system_prompt: str | None = None, *, key: str = "data.train"
    ) -> None:
        if "{prompt}" not in template:
            raise ConfigError(
                f"{key}.prompt_template is {template!r}; it must contain {{prompt}}, the question's place"
            )
        self.template, self.system_prompt = template, system_prompt

    def __call__(self, prompt: Prompt) -> Prompt:
        messages = [dict(message) for message in prompt.messages]
        if self.template != "{prompt}":
            for message in reversed(messages):
                if message["role"] in ("user", "raw"):
                    message["content"] = self._fill(message["content"], prompt)
                    break
        if self.system_prompt:
            if messages[0]["role"] == "raw":
                messages[0]["content"] = f"{self.system_prompt}\n{messages[0]['content']}"
            else:
                messages = [m for m in messages if m["role"] != "system"]
                messages.insert(0, {"role": "system", "content": self.system_prompt})
        return dataclasses.replace(prompt, messages=tuple(messages))

    def _fill(self, question: str, prompt: Prompt) -> str:
        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            if name == "prompt":
                return question
            return str(prompt.meta[name]) if name in prompt.meta else match.group(0)

        return _FIELD.sub(value, self.template)
