"""Turn tree: an episode's model calls. A turn continues another turn if its prompt begins with exactly that turn's tokens.

Each leaf is a sample: a token sequence that the model reads in one pass. A turn that several leaves share is trained in
only one leaf. So each sampled token is in exactly one loss mask, or is dropped and counted by reason.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.language.agents.chat_content import content_of, text_after_reply
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.data.images import PromptImageProcessor, PromptImages, concatenate_images, digest_of
from rlhpc.language.data.tokenizer import REPLY, render_chat
from rlhpc.language.policy_text import parse_arguments, valid_text
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


@dataclass
class AgentTurn:
    """Turn of an agent: one call of the model.

    Attributes:
        parent: Index of the turn that this turn continues; None for the first turn of a branch.
        context: Tokens of the prompt after the parent's tokens; for a first turn, all tokens of the prompt.
        token_ids, logprobs, versions: Sampled tokens, their log-probs and their weight versions.
        experts: Experts that the routers chose (`Completion.experts`); None if unknown.
        finish_reason: `stop` or `length`.
        keys: Digests of the tools, the request's messages and the reply; empty for requests that send tokens.
        received: Whether the reply has reached the client.
        role: Index of the role, if several roles use the model.
        reward: Reward of this turn; 0 if the agent sets none.
        names: Ids under which clients have received the completion.
        feedback: Delayed reward of the turn (`Feedback`); None before it arrives.
        images: Images of the prompt, including those of earlier turns.
    """

    parent: int | None
    context: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    keys: tuple[str, ...] = ()
    received: bool = False
    role: int = 0
    reward: float = 0.0
    experts: np.ndarray | None = None
    names: list[str] = field(default_factory=list)
    feedback: float | None = None
    images: PromptImages | None = None

    def mark_received(self, is_received: bool = True) -> bool:
        """Records whether the reply has reached the client; returns the previous value."""
        was_received, self.received = self.received, is_received
        return was_received


@dataclass
class TurnTree:
    """Tree of an episode's turns.

    Attributes:
        turns: All turns, in the order in which they ended.
    """

    turns: list[AgentTurn] = field(default_factory=list)

    def ids(self, turn: int) -> list[int]:
        """Returns all tokens that a turn read and sampled."""
        return [
            token
            for turn_index in self.path(turn)
            for part_ids in self._find_context_and_reply(turn_index)
            for token in part_ids
        ]

    def path(self, turn: int) -> list[int]:
        """Returns the indices of the turns from the branch's first turn to this turn."""
        indices = [turn]
        while (parent := self.turns[indices[-1]].parent) is not None:
            indices.append(parent)
        return indices[::-1]

    def find_parent(self, ids: Sequence[int], role: int = 0, images: PromptImages | None = None) -> int | None:
        """Returns the index of the longest turn whose tokens are a prefix of `ids`; None if no turn matches. The turn must
        have the same role and the same images in that prefix. Among equally long turns, the last is returned.
        """
        ids, end_positions, best_turn = list(ids), dict[int, int](), None
        for turn_index, turn in enumerate(self.turns):  # a parent comes before its children
            suffix_start = 0 if turn.parent is None else end_positions.get(turn.parent)
            if suffix_start is None or turn.role != role:
                continue
            for part_ids in self._find_context_and_reply(turn_index):
                if ids[suffix_start : suffix_start + len(part_ids)] != part_ids:
                    break
                suffix_start += len(part_ids)
            else:
                end_positions[turn_index] = suffix_start
                has_same_images = _list_image_places(turn.images) == tuple(
                    image_place for image_place in _list_image_places(images) if image_place[0] < suffix_start
                )
                if (
                    has_same_images
                    and suffix_start < len(ids)
                    and (best_turn is None or suffix_start >= end_positions[best_turn])
                ):
                    best_turn = turn_index
        return best_turn

    def _find_context_and_reply(self, turn_index: int) -> tuple[list[int], list[int]]:
        return self.turns[turn_index].context, self.turns[turn_index].token_ids

    def samples(self, number: int) -> list[Episode]:
        """Returns one sample per leaf, in an order that does not depend on which call ended first. Turns that no client
        received are not trained, and are omitted unless a received turn continues them.

        Args:
            number: Number of the episode.
        """
        received_turns = set[int]()
        for turn_index, turn in enumerate(self.turns):
            if turn.received:
                received_turns.update(self.path(turn_index))
        leaf_indices = received_turns - {self.turns[turn_index].parent for turn_index in received_turns}
        paths = sorted(
            (
                self.turns[leaf_index].role,
                self.ids(leaf_index),
                _list_image_places(self.turns[leaf_index].images),
                self.path(leaf_index),
            )
            for leaf_index in leaf_indices
        )
        trained_turns, samples, turn_counts = set[int](), list[Episode](), collections.Counter[int]()
        turn_numbers = [turn_counts.update([turn.role]) or turn_counts[turn.role] - 1 for turn in self.turns]
        for *_, path in paths:
            samples.append(self._sample(number, path, trained_turns, turn_numbers))
            trained_turns.update(path)
        return samples

    def _sample(self, number: int, path: Sequence[int], trained_turns: set[int], numbers: Sequence[int]) -> Episode:
        first_turn = self.turns[path[0]]
        sample = Episode(
            number,
            tuple(first_turn.context),
            turns=len(path),
            finish_reason=self.turns[path[-1]].finish_reason,
            role=first_turn.role,
            experts=self.turns[path[-1]].experts,
            images=self.turns[path[-1]].images,
        )
        for depth, turn_index in enumerate(path):
            turn = self.turns[turn_index]
            if depth:
                sample.append(turn.context, numbers[turn_index])
            is_trained = turn.received and turn_index not in trained_turns
            sample.append(turn.token_ids, numbers[turn_index], turn.logprobs, turn.versions, is_trained=is_trained)
            sample.rewards += [0.0] * (len(sample.token_ids) - len(sample.rewards))
            if is_trained and turn.token_ids:
                sample.rewards[-1] = turn.reward
        return sample

    def counts(self) -> collections.Counter[str]:
        """Counts turns, branches, sampled tokens, and sampled tokens that no client received."""
        return collections.Counter(
            turns=len(self.turns),
            branches=sum(turn.parent is None for turn in self.turns),
            drawn=sum(len(turn.token_ids) for turn in self.turns),
            not_received=sum(len(turn.token_ids) for turn in self.turns if not turn.received),
        )


def _list_image_places(images: PromptImages | None) -> tuple[tuple[int, bytes], ...]:
    return () if images is None else images.places


#: Placeholder for the text of the image token in a message's text, where it does not stand for an image.
_LITERAL_IMAGE_TOKEN = "SPOKENOF9B1C"
#: Error code of requests that exceed the context or the episode's limits.
OVER = "context_length_exceeded"
#: Lower bound of the assumed length of the longest token, in characters. It limits a conversation before it is encoded.
_TOKEN_CHARACTERS = 16
Message = dict[str, Any]


class RequestError(Exception):
    """Error of a refused request.

    Args:
        message: Message for the client.
        status: HTTP status.
        code: Error code of OpenAI's format; `context_length_exceeded` ends the episode in most agents.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def canonical(message: Mapping[str, Any]) -> Message:
    """Converts a client's message to the form that chat templates expect; stores its images, if any, under `images`.

    Raises:
        RequestError: The message is invalid or uses `function_call`.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("messages must be a list of objects with role and content")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    try:
        text_content, images = content_of(message.get("content"))
    except ConfigError as error:
        raise RequestError(str(error)) from None
    canonical_message: Message = {"role": role, "content": text_content, **({"images": images} if images else {})}
    reasoning = _read_text_field(message, "reasoning_content") or _read_text_field(message, "reasoning")
    if reasoning:
        canonical_message["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError("a message's tool_calls must be a list")
    if calls:
        canonical_message["tool_calls"] = [_canonicalize_call(call) for call in calls]
    if message.get("function_call"):
        raise RequestError("a message has a function_call; functions are tools here: send tool_calls")
    for name in ("tool_call_id", "name"):
        if field_text := _read_text_field(message, name):
            canonical_message[name] = field_text
    return canonical_message


def _read_text_field(message: Mapping[str, Any], name: str) -> str:
    field_text = message.get(name)
    if field_text is not None and not isinstance(field_text, str):
        raise RequestError(f"a message's {name} must be a text")
    return field_text or ""


def _canonicalize_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, (str, dict, type(None))):
        raise RequestError(
            "a message's tool_calls must each have a function with a name, and with arguments as a text or an object"
        )
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError("the id of a message's tool call must be a text")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parse_arguments(arguments)}}


def key_of(message: Message) -> str:
    """Returns a digest of a message's content. Ids of tool calls and surrounding white space do not change it."""
    compared_fields = {
        name: field_value for name, field_value in message.items() if name not in ("tool_call_id", "name")
    }
    compared_fields["content"] = _remove_surrounding_space(message["content"])
    if "images" in compared_fields:
        compared_fields["images"] = [digest_of(image) for image in compared_fields["images"]]
    if "reasoning_content" in compared_fields:
        compared_fields["reasoning_content"] = compared_fields["reasoning_content"].strip()
    if "tool_calls" in compared_fields:
        compared_fields["tool_calls"] = [call["function"] for call in compared_fields["tool_calls"]]
    return _compute_digest(compared_fields)


def _remove_surrounding_space(message_content: Any) -> Any:
    if isinstance(message_content, str):
        return message_content.strip()
    return [
        content_part["text"].strip() if "text" in content_part else content_part for content_part in message_content
    ]


def keys_of(messages: Sequence[Message], tools: Any) -> tuple[str, ...]:
    """Returns the digest of the tools, followed by the digest of each message."""
    return (_compute_digest(tools or []), *map(key_of, messages))


def _compute_digest(json_value: Any) -> str:
    return hashlib.blake2b(json.dumps(json_value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


class Renderer:
    """Renderer of conversations: converts them to tokens with a tokenizer's chat template.

    Args:
        tokenizer: Tokenizer of transformers.
        image_processor: Image processor; None if the model reads only text.
        context: Maximum number of tokens that the model reads.
    """

    def __init__(
        self, tokenizer: Any, image_processor: PromptImageProcessor | None = None, context: int = sys.maxsize
    ) -> None:
        self.tokenizer, self.image_processor, self.context = tokenizer, image_processor, context

    @functools.cached_property
    def _max_characters(self) -> int:
        """Maximum number of characters in a full context of the longest tokens."""
        return self.context * max(_TOKEN_CHARACTERS, *map(len, self.tokenizer.get_vocab()))

    def check_count(self, messages: Sequence[Any]) -> None:
        """Checks the number of messages.

        Raises:
            RequestError: There are more messages than tokens in the context.
        """
        if len(messages) > self.context:
            raise RequestError(
                f"{len(messages)} messages leave no room in the context of {self.context} tokens", code=OVER
            )

    def check_length(self, messages: Sequence[Message], tools: Any) -> None:
        """Checks the length of messages and tools.

        Raises:
            RequestError: They have more characters than fit in a full context of the longest tokens.
        """
        if self.context == sys.maxsize:
            return
        num_characters = _count_characters([{**message, "images": None} for message in messages]) + _count_characters(
            tools
        )
        if num_characters > self._max_characters:
            raise RequestError(
                f"messages and tools of {num_characters} characters leave no room in the context of {self.context} tokens",
                code=OVER,
            )

    def prompt(
        self, tree: TurnTree, messages: Sequence[Message], keys: tuple[str, ...], tools: Any, role: int = 0
    ) -> tuple[list[int], int | None, PromptImages | None]:
        """Returns the tokens of a conversation, the index of the turn that it continues or None, and its images or None.

        Args:
            tree: Earlier turns of the episode.
            messages: Conversation in canonical form.
            keys: Digests of the tools and messages (`keys_of`).
            tools: Tools as the client sent them.
            role: Index of the role; only turns of the same role are continued.

        Raises:
            RequestError: The template refuses the conversation, or the model does not read images.
        """
        if self.image_processor is None and any("images" in message for message in messages):
            raise RequestError("a message shows a picture; this model reads text alone")
        parent, matched_length = None, 0
        for turn_index, turn in enumerate(tree.turns):
            if turn.role != role:
                continue
            if matched_length <= len(turn.keys) < len(keys) and turn.keys and keys[: len(turn.keys)] == turn.keys:
                parent, matched_length = turn_index, len(turn.keys)
        if parent is not None:
            reply = tree.turns[parent]
            rendered_suffix = self._render_after(messages, matched_length - 2, tools, reply.token_ids)
            if rendered_suffix is not None:
                prefix_ids = tree.ids(parent)
                ids, images = self._encode(rendered_suffix, messages[matched_length - 1 :], len(prefix_ids))
                return prefix_ids + ids, parent, concatenate_images(reply.images, images)
        ids, images = self._encode(self._text(messages, tools), messages)
        return ids, tree.find_parent(ids, role, images), images

    def _render_after(self, messages: Sequence[Message], reply: int, tools: Any, sampled_ids: list[int]) -> str | None:
        """Returns the rendered text after the message with index `reply`; None if the template changes the reply."""
        marked_messages = [*messages]
        marked_messages[reply] = {"role": "assistant", "content": REPLY}
        try:
            rendering = self._text(marked_messages, tools)
        except RequestError:  # the template requires the tool calls, which the placeholder omits
            return None
        return text_after_reply(self.tokenizer, rendering, sampled_ids) if rendering.count(REPLY) == 1 else None

    def _encode(
        self, text: str, messages: Sequence[Message], num_prior_tokens: int = 0
    ) -> tuple[list[int], PromptImages | None]:
        """Tokenizes rendered messages that follow `num_prior_tokens` tokens. Returns the token ids, including image tokens,
        and the images or None.
        """
        ids, literal_positions, text = list[int](), set[int](), valid_text(text)
        if self.image_processor is None:
            return self.tokenizer.encode(text, add_special_tokens=False), None
        for part_number, text_part in enumerate(text.split(_LITERAL_IMAGE_TOKEN)):
            if part_number:
                literal_positions.add(len(ids))
                ids.append(self.image_processor.token)
            ids += self.tokenizer.encode(text_part, add_special_tokens=False)
        images = [image for message in messages for image in message.get("images", ())]
        if not images:
            return ids, None
        try:
            return self.image_processor.process_prompt(images, ids, num_prior_tokens, literal_positions)
        except ConfigError as error:
            raise RequestError(str(error)) from None

    def _text(self, messages: Sequence[Message], tools: Any) -> str:
        text_messages = [
            {name: field_value for name, field_value in message.items() if name != "images"} for message in messages
        ]
        if self.image_processor is not None:
            text_messages = _remove_image_token(
                text_messages, self.tokenizer.convert_ids_to_tokens(self.image_processor.token)
            )
        try:
            return render_chat(self.tokenizer, text_messages, tools or (), add_generation_prompt=True)
        except ConfigError as error:
            raise RequestError(str(error)) from None


def _count_characters(json_value: Any) -> int:
    """Returns the total number of characters of all texts in a nested value."""
    if isinstance(json_value, str):
        return len(json_value)
    if isinstance(json_value, Mapping):
        return sum(_count_characters(name) + _count_characters(child) for name, child in json_value.items())
    return sum(map(_count_characters, json_value)) if isinstance(json_value, list) else 0


def _remove_image_token(message_content: Any, image_token: str) -> Any:
    """Returns nested content in which `_LITERAL_IMAGE_TOKEN` replaces the image token's text `image_token`."""
    if isinstance(message_content, str):
        return message_content.replace(image_token, _LITERAL_IMAGE_TOKEN)
    if isinstance(message_content, Mapping):
        return {name: _remove_image_token(child, image_token) for name, child in message_content.items()}
    return (
        [_remove_image_token(child, image_token) for child in message_content]
        if isinstance(message_content, list)
        else message_content
    )
