"""Answers a conversation with the target: makes the prompt of each turn, and checks what the target wrote there.

Every assistant turn is answered anew, and so is a question at the end. A text to continue is a conversation too: its
question is the text's beginning, and its template is PLAIN of chat.py.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import (
    NONCHARACTERS,
    BadDocument,
    Conversation,
    Document,
    Unusable,
    messages_digest,
    read_messages,
)
from longdraft.data_prep.tokenize import rust_tokenizer

Message = tuple[str, str | None]  # role and content; None: an answer that is still due
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what stands for bytes that are no whole character
CHARACTERS_A_TOKEN = 32  # of a text's beginning that are tokenised: more than tokens of text have


@dataclass(frozen=True)
class Completion:
    """What the target wrote after prompt `index` of a call. text: without an end token, other special tokens spelled
    out. ended: whether the target ended it."""

    index: int
    text: str
    ended: bool


# From prompts (token ids) and their seeds (unsigned, 64 bits) to their completions, as they are finished, in any order.
Generate = Callable[[Sequence[list[int]], Sequence[int]], Iterable[Completion]]
Prompt = tuple[list[int], int]  # token ids and seed


@dataclass(frozen=True)
class Asking:
    """What an answer depends on besides its conversation and the target.

    seed: the seed of all answers. max_prompt: most tokens of a prompt. keep_unfinished: whether an answer without an
    end becomes its conversation's last one; if not, the conversation is bad. beginning: if texts are continued, the
    least and most tokens of their beginnings.
    """

    encoder: ChatEncoder
    seed: int
    max_prompt: int
    keep_unfinished: bool
    beginning: tuple[int, int] | None


def answer(document: Conversation | Document | BadDocument, asking: Asking) -> Generator[Prompt, Completion, dict]:
    """Answer a document's open turns: yields the prompt of each, and is sent its completion.

    Returns the record for `prepare`: {"messages", "source"}, and "unfinished" if the last answer was cut. Raises
    Unusable.
    """
    if isinstance(document, Document) and asking.beginning is not None:
        document = beginning(document, *asking.beginning, rust_tokenizer(asking.encoder.serialised))
    if not isinstance(document, Conversation):
        raise Unusable(*(document.why, document.detail) if isinstance(document, BadDocument) else ("not_a_list",))
    messages, turn, unfinished = list[tuple[str, str]](), 0, False
    for role, content in open_answers(document.messages):
        if content is None:
            prompt = asking.encoder.encode_prompt(messages)
            if len(prompt) > asking.max_prompt:
                raise Unusable("prompt_too_long")
            completion = yield prompt, answer_seed(asking.seed, document.messages, turn)
            content, unfinished, turn = _checked(completion, asking), not completion.ended, turn + 1
        messages.append((role, content))
        if unfinished:
            break
    record = {"messages": [{"role": role, "content": content} for role, content in messages], "source": document.name}
    return record | ({"unfinished": True} if unfinished else {})


def open_answers(messages: Sequence[tuple[str, str]]) -> list[Message]:
    """The messages with None as the content of every answer, also of one due after a last question. Raises Unusable."""
    if all(role != "user" for role, _ in messages):
        raise Unusable("no_user_turn")
    opened: list[Message] = []
    question_open = False
    for role, content in messages:
        if role == "assistant" and not question_open:
            raise Unusable("answer_unasked")
        opened.append((role, None if role == "assistant" else content))
        question_open = role == "user" or (question_open and role != "assistant")
    return [*opened, ("assistant", None)] if question_open else opened


def beginning(document: Document, least: int, most: int, tokenizer: Tokenizer) -> Conversation:
    """A conversation whose question is the document's beginning of `least` to `most` tokens, chosen by the document's
    hash; if they end within the first character, all of it. Raises Unusable if the document ends there.

    tokenizer: from `rust_tokenizer`."""
    count = least + int.from_bytes(document.digest[:8], "little") % (most - least + 1)
    text = document.text[: CHARACTERS_A_TOKEN * (count + 1)]
    following = tokenizer.encode(text, add_special_tokens=False).offsets[count:]
    end = next((start for start, _ in following if start > 0), None)
    if end is None:
        raise Unusable("too_short")
    messages = read_messages([{"role": "user", "content": text[:end]}], answered=False)
    return Conversation(document.name, messages_digest(messages), messages)


def answer_seed(seed: int, messages: Sequence[tuple[str, str]], turn: int) -> int:
    """The seed of an answer (unsigned, 64 bits).

    seed: the call's. messages: the conversation as it was given. turn: the number of answers before this one.
    """
    key = f"{seed}:{messages_digest(messages).hex()}:{turn}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def _checked(completion: Completion, asking: Asking) -> str:
    """The answer's text. Raises Unusable if `prepare` could not learn it."""
    if not completion.ended and not asking.keep_unfinished:
        raise Unusable("unfinished")
    text = completion.text if completion.ended else completion.text.rstrip(NO_CHARACTER)
    if not text.strip():
        raise Unusable("empty_answer")
    if NO_CHARACTER in text or NONCHARACTERS.search(text):
        raise Unusable("not_text")
    if any(spelling in text for spelling in asking.encoder.template.special):
        raise Unusable("special_token_in_answer")
    # Templates that write a blank before an answer do so themselves, but a text goes on with its own.
    return text.removeprefix(" ") if completion.ended and asking.beginning is None else text
