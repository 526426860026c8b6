"""Conversations as tokens, by the tokenizer's template, with a mark on each token of an answer.

A data set's column of conversations travels as JSON text; :class:`Chat` makes tokens of it. Where the template says by
``{% generation %}`` what an assistant writes, transformers marks it. Elsewhere a conversation is rendered up to each
answer, with the words that ask for one, and through it: what the second has more is the answer.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from course_lib.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("messages", "conversations")
"""Columns of conversations."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with the answers and the token that ends them marked."""

SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Roles by their names in ShareGPT's form, ``{"from": …, "value": …}``; others are called alike."""

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Answered(NamedTuple):
    """The tokens of a conversation.

    Attributes:
        input_ids: all of them.
        answers: of each whether an assistant writes it.
    """

    input_ids: list[int]
    answers: list[bool]

    def cut(self, length: int) -> "Answered":
        """Its first tokens; nothing predicts the very first."""
        return Answered(self.input_ids[:length], [False, *self.answers[1:length]])


def holds_conversations(name: str, kind: pa.DataType) -> bool:
    """Whether a column is one of conversations, a list of objects in each row, by its name and Arrow type."""
    is_list = types.is_list(kind) or types.is_large_list(kind)
    return name.lower() in COLUMNS and (isinstance(kind, pa.JsonType) or (is_list and types.is_struct(kind.value_type)))


def as_json(values: pa.Array) -> pa.Array:
    """Conversations as JSON text; nothing stays nothing."""
    if isinstance(values.type, pa.JsonType):
        return values.storage
    return pa.array(
        [None if value is None else json.dumps(value, ensure_ascii=False) for value in values.to_pylist()], pa.string()
    )


def contents(conversation: str) -> str:
    """Texts of a conversation, a turn after the other; of what is none, nothing."""
    try:
        return "\n".join(turn["content"] for turn in turns_of(conversation, ""))
    except DataError:
        return ""


def turns_of(conversation: str, where: str) -> list[dict[str, Any]]:
    """The turns of a conversation, each with a ``role`` and a ``content`` of text.

    Args:
        conversation: JSON.
        where: which one, for the error.
    Raises:
        DataError: it holds something else.
    """
    turns = json.loads(conversation) if conversation else None
    form = 'give each row a list of {"role": "…", "content": "…"}'
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where} holds no conversation", form)
    made = []
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("role") is None and isinstance(turn.get("from"), str):
            turn = {"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn.get("value")}
        missing = next(
            (name for name in ("role", "content") if not isinstance(turn, dict) or not isinstance(turn.get(name), str)),
            None,
        )
        if missing:
            raise DataError(f"{where}: its turn {number} (from 0) has no {missing} of text", form)
        made.append({name: value for name, value in turn.items() if value is not None})
    return made


def template(chosen: str) -> str:
    """The template that the option ``chat_template`` names: `chatml` or a file.

    Raises:
        DataError: the file cannot be read.
    """
    if chosen == "chatml":
        return CHATML
    try:
        return Path(chosen).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise DataError(f"chat_template {chosen} cannot be read ({reason})", "give a Jinja file, or chatml") from None


class Chat:
    """Makes tokens of conversations, and marks those of the answers.

    Args:
        tokenizer: with a chat template; a fast one.
    Raises:
        ModelError: it is another.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, which makes a text of a conversation",
                "give one: --chat_template chatml, or a Jinja file",
            )
        if not tokenizer.is_fast:
            raise ModelError(
                "the tokenizer is a slow one, which does not say where in the text a token is",
                "use a model with a tokenizer.json",
            )
        self.tokenizer = tokenizer
        self.marks = MARKS_ANSWERS.search(tokenizer.get_chat_template()) is not None

    def __call__(self, conversation: str, where: str) -> Answered:
        """The tokens of a conversation, which is JSON.

        Raises:
            DataError: it is no conversation, or one that the template refuses or cannot be asked about; ``where`` says
                which.
        """
        from jinja2 import TemplateError  # transformers, too, imports it where a template is first rendered

        turns = turns_of(conversation, where)
        try:
            if self.marks:
                made: Mapping[str, Any] = self.tokenizer.apply_chat_template(
                    turns, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
                )
                return Answered(list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]])
            text = self._rendered(turns)
            spans = list(self._answers(turns, text, where))
        except TemplateError as error:
            raise DataError(
                f"{where}: the chat template refuses it ({error})", "mend the row, or leave it out"
            ) from None
        made = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        answers = [
            any(first <= start < end for first, end in spans) and start < stop for start, stop in made["offset_mapping"]
        ]
        return Answered(list(made["input_ids"]), answers)

    def _rendered(self, turns: Sequence[Mapping[str, Any]], asks: bool = False) -> str:
        return str(self.tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=asks))

    def _answers(self, turns: Sequence[Mapping[str, Any]], whole: str, where: str) -> Iterator[tuple[int, int]]:
        """Where in the rendered whole each answer begins and ends."""
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            if number == 0:
                raise DataError(
                    f"{where} begins with an answer, and the chat template does not mark answers",
                    "let it begin with another turn, or put {% generation %} into the template",
                )
            asked, through = self._rendered(turns[:number], asks=True), self._rendered(turns[: number + 1])
            if not (through.startswith(asked) and whole.startswith(through)):
                raise DataError(
                    f"{where}: the chat template renders what comes before turn {number} (from 0) "
                    "otherwise when more follows, so where that answer is cannot be seen",
                    "put {% generation %} and {% endgeneration %} around answers in the template",
                )
            yield len(asked), len(through)
