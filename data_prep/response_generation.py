"""Answers conversations with the target: makes its prompts, and turns its completions into answers.

Every assistant turn is open, that is, to be answered, and so is a question at the end. A text to continue is a
conversation too: its question is the text's beginning, and its template is PLAIN of chat.py. The target is a function
from prompts to completions (`Generate`), both as token ids. A prompt's tokens are those that chat.py makes of the same
conversation, and an answer counts only if chat.py finds it again, so that `prepare` can use the result.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from longdraft.data_prep.chat import PLAIN_TEMPLATE, THOUGHT, ChatEncoder
from longdraft.data_prep.documents import (
    BAD_ANSWER,
    NONCHARACTERS,
    BadDocument,
    Conversation,
    Document,
    Unusable,
    messages_digest,
    read_messages,
)
from longdraft.data_prep.tokenize import rust_tokenizer

# The reasons that count as an error: the target should have answered the conversation. With any other reason it is
# skipped, and the target is not asked. Because of chat.py's reasons `prepare` would leave out the answer, too.
ERRORS = (*BAD_ANSWER, "refused_by_template", "prompt_not_kept", "answer_not_found", "special_token_in_text")

Message = tuple[str, str | None]  # role and content; None: an answer that is still due
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes bytes to that are no whole character
MOST_BYTES = 4  # of a character
THOUGHT_TOKENS = 16  # how many of a prompt's last tokens may open a thought
# Characters of a document to tokenise first, for each token of its beginning: more than tokens of text have.
MOST_CHARACTERS = 32


@dataclass(frozen=True)
class Completion:
    """What the target wrote after prompt `index` of a call. tokens: its token ids. ended: whether the last one is an
    end token."""

    index: int
    tokens: list[int]
    ended: bool


# From prompts (token ids) and their seeds (unsigned, 64 bits) to their completions, as they are finished, in any order.
Generate = Callable[[Sequence[list[int]], Sequence[int]], Iterable[Completion]]


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


def beginning(document: Document, least: int, most: int, tokenizer: Tokenizer) -> Conversation | BadDocument:
    """A conversation whose question is the document's beginning of `least` to `most` tokens, chosen by the document's
    hash; if they end within the first character, all of it. A BadDocument if the document ends there, or if the text
    cannot be a message.

    tokenizer: from `rust_tokenizer`."""
    count = least + int.from_bytes(document.digest[:8], "little") % (most - least + 1)
    text, following = document.text, list[int]()
    for size in (MOST_CHARACTERS * (count + 1), len(text)):  # a text of long tokens (blanks, signs) is read to its end
        offsets = tokenizer.encode(text[:size], add_special_tokens=False).offsets
        following = [begin for begin, _ in offsets[count:] if begin > 0]
        if len(following) > 1:  # with only one, it may be cut off by text[:size]
            break
    try:
        if not following:
            raise Unusable("too_short")
        messages = read_messages([{"role": "user", "content": text[: following[0]]}], answered=False)
    except Unusable as error:
        return BadDocument(document.name, document.digest, error.why)
    return Conversation(document.name, messages_digest(messages), messages)


def text_behind(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that the tokens add after the prompt. Decoding them alone would lose the first blank with a tokenizer
    whose words begin with one.

    tokenizer: the Rust tokenizer, because transformers may clean up blanks."""
    begin = len(prompt) - 1
    while begin > 0 and UNFINISHED in tokenizer.decode([prompt[begin]], skip_special_tokens=False):
        begin -= 1
    head = list(prompt[max(begin, 0) :])
    before, whole = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (head, [*head, *tokens]))
    return whole[len(before) :]


def answer_seed(seed: int, messages: Sequence[tuple[str, str]], turn: int) -> int:
    """The seed of an answer (unsigned, 64 bits).

    seed: the call's. messages: the conversation as it was given. turn: the number of answers before this one.
    """
    key = f"{seed}:{messages_digest(messages).hex()}:{turn}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


class Answering:
    """A conversation while the target answers its open turns, one after another.

    Attributes:
        name: the document's.
        messages: (role, content), up to the answer that is due.
        prompt: the token ids before the answer that is due; None once the conversation is complete or left out.
        turn: number of answers so far.
        generated: tokens of all completions.
        reread: number of answers whose text tokenises differently from what the target wrote.
        unfinished: whether the last answer was cut, and kept.
        why, detail: the reason why the conversation is left out, as in BadDocument; None and "" if it is not.

    Args:
        document: what was read from the sources.
        encoder: for the target's tokenizer and chat template.
        max_prompt: most tokens of a prompt.
        keep_unfinished: whether an answer without an end becomes its conversation's last one, instead of an error.
    """

    def __init__(
        self,
        document: Conversation | BadDocument,
        encoder: ChatEncoder,
        max_prompt: int,
        keep_unfinished: bool = False,
    ):
        self.name, self._document, self._encoder = document.name, document, encoder
        self._max_prompt, self._keep_unfinished = max_prompt, keep_unfinished
        self._tokenizer = rust_tokenizer(encoder.serialised)
        self.messages: list[tuple[str, str]] = []
        self.prompt: list[int] | None = None
        self.turn = self.generated = self.reread = 0
        self.unfinished, self.detail = False, ""
        self.why: str | None = None
        try:
            if isinstance(document, BadDocument):
                raise Unusable(document.why, document.detail)
            self._to_come = deque(open_answers(document.messages))
            self._go_on()
        except Unusable as error:
            self.why, self.detail = error.why, error.detail

    def seed(self, seed: int) -> int:
        """The seed of the answer that is due. seed: the call's."""
        assert isinstance(self._document, Conversation), self.name
        return answer_seed(seed, self._document.messages, self.turn)

    def take(self, completion: Completion) -> None:
        """Make the completion the answer that is due and set the next prompt, or leave the conversation out."""
        assert self.prompt is not None, self.name
        prompt, self.prompt = self.prompt, None
        self.generated += len(completion.tokens)
        try:
            self._add_answer(prompt, completion)
            self._go_on()
        except Unusable as error:
            self.why, self.detail = error.why, error.detail

    def _go_on(self) -> None:
        """Set the prompt of the next open turn. Raises Unusable."""
        while self._to_come:
            role, content = self._to_come.popleft()
            if content is None:
                prompt = self._encoder.encode_prompt(self.messages)
                if len(prompt) > self._max_prompt:
                    raise Unusable("prompt_too_long")
                self.prompt = prompt
                return
            self.messages.append((role, content))

    def _add_answer(self, prompt: list[int], completion: Completion) -> None:
        ended = completion.ended
        if not ended and not self._keep_unfinished:
            raise Unusable("unfinished")
        tokens = completion.tokens[:-1] if ended else completion.tokens
        if not {self._encoder.eos_id, *self._encoder.template.special.values()}.isdisjoint(tokens):
            raise Unusable("special_token_in_answer")
        # A chat template may write or strip an answer's first blank, so try without it first; a continuation has it.
        texts = [self._text(before, tokens, ended) for before in ((), prompt)]
        written = texts[-1]
        if not written.strip():
            raise Unusable("empty_answer")
        if UNFINISHED in written or NONCHARACTERS.search(written):
            raise Unusable("not_text")
        if self._encoder.template.source.endswith(PLAIN_TEMPLATE):
            texts.reverse()
        prompt_end = self._tokenizer.decode(prompt[-THOUGHT_TOKENS:], skip_special_tokens=False)
        if opened := THOUGHT.search(prompt_end):  # the template expects the thought that it opens in the answer
            texts.insert(0, opened[0] + written)
        text, learned = self._read_back(texts, tokens, ended)
        if not ended:
            # A template may add to a cut answer: Qwen3's closes an empty thought before a thought that has no end.
            kept = self._tokenizer.decode(learned, skip_special_tokens=False).strip()
            if not kept or not written.strip().startswith(kept):
                raise Unusable("unfinished")
            self.unfinished = True
            self._to_come.clear()
        self.reread += learned[: len(tokens)] != tokens
        self.messages.append(("assistant", text))
        self.turn += 1

    def _text(self, prompt: Sequence[int], tokens: list[int], ended: bool) -> str:
        """The answer's text behind the prompt, without a character that was cut."""
        if ended:
            return text_behind(self._tokenizer, prompt, tokens)
        # Where bytes are tokens, those of the last character may spoil the ones before it.
        beginnings = [tokens[: len(tokens) - count] for count in range(MOST_BYTES)]
        return max((text_behind(self._tokenizer, prompt, some).rstrip(UNFINISHED) for some in beginnings), key=len)

    def _read_back(self, texts: Sequence[str], tokens: list[int], ended: bool) -> tuple[str, list[int]]:
        """The first of the texts that `prepare` turns back into these tokens, or else the first that it accepts as an
        answer, each with the tokens that `prepare` makes of it. Raises Unusable."""
        accepted, refused = list[tuple[str, list[int]]](), list[Unusable]()
        for text in dict.fromkeys(texts):
            answered = Conversation(self.name, b"", (*self.messages, ("assistant", text)), not ended)
            try:
                last = self._encoder.encode_document(answered)[-1]
            except Unusable as error:
                refused.append(error)
                continue
            learned = last.tokens[slice(*last.spans[-1])].tolist()
            if learned[: len(tokens)] == tokens:
                return text, learned
            accepted.append((text, learned))
        if not accepted:
            raise refused[0]
        return accepted[0]
