"""Answers conversations with the target: makes its prompts, and turns its completions into answers.

Every assistant turn is open, that is, to be answered, and so is a question at the end. A text to continue is a
conversation too: its question is the text's beginning, and its template is PLAIN of chat.py. The target is a function
from prompts to completions (`Generate`), both as token ids. A prompt's tokens are those that chat.py makes of the same
conversation, and an answer counts only if chat.py finds it again, so that `prepare` can use the result.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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
    end token. count: how many tokens it wrote, if `tokens` come from tokenising its text."""

    index: int
    tokens: list[int]
    ended: bool
    count: int | None = None


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


@dataclass
class OpenConversation:
    """A conversation while its open turns are answered.

    digest: sha256 of the conversation as it was given. turn: number of answers so far. generated: tokens of all its
    answers. reread: number of answers whose text tokenises differently from what the target wrote. why: the reason why
    it is left out, or None. detail: see BadDocument. unfinished: the last answer was cut, and kept. prompt: the tokens
    before the answer that is due.
    """

    name: str
    digest: bytes
    messages: list[Message]
    turn: int = 0
    generated: int = 0
    reread: int = 0
    why: str | None = None
    detail: str = ""
    unfinished: bool = False
    prompt: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, document: Conversation | BadDocument) -> "OpenConversation":
        if isinstance(document, BadDocument):
            return cls(document.name, document.digest, [], why=document.why, detail=document.detail)
        conversation = cls(document.name, messages_digest(document.messages), [])  # `document.digest` may be its file's
        with conversation.left_out_if_unusable():
            conversation.messages = open_answers(document.messages)
        return conversation

    @contextmanager
    def left_out_if_unusable(self) -> Iterator[None]:
        """In this context Unusable leaves the conversation out."""
        try:
            yield
        except Unusable as error:
            self.why, self.detail = error.why, error.detail

    @property
    def due(self) -> int | None:
        """The index of the next message to answer; None if there is none, or the conversation is left out."""
        if self.why is not None:
            return None
        return next((i for i, (_, content) in enumerate(self.messages) if content is None), None)

    @property
    def before(self) -> list[tuple[str, str]]:
        """The messages before the answer that is due."""
        return [(role, content) for role, content in self.messages[: self.due] if content is not None]

    def seed(self, seed: int) -> int:
        """The seed of the answer that is due (unsigned, 64 bits). seed: the call's."""
        key = f"{seed}:{self.digest.hex()}:{self.turn}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


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


class Answerer:
    """Makes prompts of conversations, and answers of completions.

    encoder: for the target's tokenizer and chat template. max_prompt: most tokens of a prompt. keep_unfinished: whether
    an answer without an end becomes its conversation's last one, instead of an error.
    """

    def __init__(self, encoder: ChatEncoder, max_prompt: int, keep_unfinished: bool = False):
        self._encoder, self._max_prompt, self._keep_unfinished = encoder, max_prompt, keep_unfinished
        self._tokenizer = rust_tokenizer(encoder.serialised)
        self._control = frozenset(encoder.template.special.values()) | {encoder.eos_id}
        self._continues_texts = encoder.template.source.endswith(PLAIN_TEMPLATE)

    def answer(
        self,
        conversations: Sequence[OpenConversation],
        generate: Generate,
        seed: int,
        on_done: Callable[[OpenConversation], object],
    ) -> None:
        """Answer the first open turn of every conversation, then the second of those that have one, and so on.

        So every call of `generate` gets as many prompts as possible to decode together. on_done: called with each
        conversation as soon as it is complete or left out.
        """
        while waiting := [conversation for conversation in conversations if conversation.due is not None]:
            for conversation in waiting:
                with conversation.left_out_if_unusable():
                    self.make_prompt(conversation)
                if conversation.due is None:
                    on_done(conversation)
            asked = [conversation for conversation in waiting if conversation.due is not None]
            missing, prompts = set(range(len(asked))), [conversation.prompt for conversation in asked]
            for completion in generate(prompts, [one.seed(seed) for one in asked]) if asked else ():
                missing.remove(completion.index)
                conversation = asked[completion.index]
                conversation.generated += len(completion.tokens)
                with conversation.left_out_if_unusable():
                    self.take(conversation, completion)
                if conversation.due is None:
                    on_done(conversation)
            assert not missing, f"{len(missing)} prompts were not answered"

    def make_prompt(self, conversation: OpenConversation) -> None:
        """Set the token ids before the answer that is due. Raises Unusable."""
        conversation.prompt = self._encoder.encode_prompt(conversation.before)
        if len(conversation.prompt) > self._max_prompt:
            raise Unusable("prompt_too_long")

    def take(self, conversation: OpenConversation, completion: Completion) -> None:
        """Make the completion the conversation's answer that is due. Raises Unusable."""
        due = conversation.due
        assert due is not None
        if not completion.ended and not self._keep_unfinished:
            raise Unusable("unfinished")
        tokens = completion.tokens[:-1] if completion.ended else completion.tokens
        if not self._control.isdisjoint(tokens):
            raise Unusable("special_token_in_answer")
        # A chat template may write or strip an answer's first blank, so try without it first; a continuation has it.
        texts = [self._text(prompt, tokens, completion.ended) for prompt in ((), conversation.prompt)]
        written = texts[-1]
        if not written.strip():
            raise Unusable("empty_answer")
        if UNFINISHED in written or NONCHARACTERS.search(written):
            raise Unusable("not_text")
        if self._continues_texts:
            texts.reverse()
        prompt = self._tokenizer.decode(conversation.prompt[-THOUGHT_TOKENS:], skip_special_tokens=False)
        if opened := THOUGHT.search(prompt):  # the template opens a thought in the prompt, and expects it in the answer
            texts.insert(0, opened[0] + written)
        text, learned = self._read_back(conversation, texts, tokens, completion.ended)
        if not completion.ended:
            # A template may add to a cut answer: Qwen3's closes an empty thought before a thought that has no end.
            kept = self._tokenizer.decode(learned, skip_special_tokens=False).strip()
            if not kept or not written.strip().startswith(kept):
                raise Unusable("unfinished")
        is_same = learned[: len(tokens)] == tokens and completion.count in (None, len(completion.tokens))
        conversation.reread += not is_same
        conversation.messages[due] = ("assistant", text)
        conversation.turn += 1
        if not completion.ended:
            conversation.unfinished = True
            del conversation.messages[due + 1 :]

    def _text(self, prompt: Sequence[int], tokens: list[int], ended: bool) -> str:
        """The answer's text behind the prompt, without a character that was cut."""
        if ended:
            return text_behind(self._tokenizer, prompt, tokens)
        # Where bytes are tokens, those of the last character may spoil the ones before it.
        beginnings = [tokens[: len(tokens) - count] for count in range(MOST_BYTES)]
        return max((text_behind(self._tokenizer, prompt, some).rstrip(UNFINISHED) for some in beginnings), key=len)

    def _read_back(
        self, conversation: OpenConversation, texts: Sequence[str], tokens: list[int], ended: bool
    ) -> tuple[str, list[int]]:
        """The first of the texts that `prepare` turns back into these tokens, or else the first that it accepts as an
        answer, each with the tokens that `prepare` makes of it. Raises Unusable."""
        accepted, refused = list[tuple[str, list[int]]](), list[Unusable]()
        for text in dict.fromkeys(texts):
            messages = (*conversation.before, ("assistant", text))
            answered = Conversation(conversation.name, conversation.digest, messages, not ended)
            try:
                last = self._encoder.encode_document(answered)[-1]
            except Unusable as error:
                refused.append(error)
                continue
            begin, end = last.spans[-1]
            accepted.append((text, last.tokens[begin:end].tolist()))
            if accepted[-1][1][: len(tokens)] == tokens:
                return accepted[-1]
        if not accepted:
            raise refused[0]
        return accepted[0]
