"""The target answers conversations anew: what it is asked, and what is made of what it writes.

Every assistant's turn is open, and so is a question at the end. A text to continue is a conversation too: its question
is the text's beginning, its template chat.py's PLAIN. The target is handed in as a function from prompts to completions
(`Generate`), both as token ids. A prompt's tokens are those that chat.py makes of the same conversation, and an answer
counts only if chat.py finds it again, so that `prepare` can use what comes out. Not here: where conversations come from
and go to (regenerate.py).
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from longdraft.data_prep.chat import PLAIN_TEMPLATE, ChatEncoder
from longdraft.data_prep.documents import (
    BAD_ANSWER,
    NONCHARACTERS,
    BadDocument,
    Conversation,
    Document,
    Unusable,
    check_messages,
    messages_digest,
)
from longdraft.data_prep.tokenize import rust_tokenizer

# Why a conversation is left out that the target was to answer; for all other reasons ("skipped") it is not asked.
# What chat.py says of a prompt or of its answer, `prepare` would say too.
ERRORS = (*BAD_ANSWER, "refused_by_template", "prompt_not_kept", "answer_not_found", "special_token_in_text")

Message = tuple[str, str | None]  # role and content; None: an answer that is due
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer shows for bytes that are no whole character
THOUGHT, THOUGHT_TOKENS = re.compile(r"<think>\s*\Z"), 16  # what opens one at a prompt's end, and where to look for it
# Characters of a document that are tokenised for each token of its beginning, at first: more than texts have, less than
# books.
MOST_CHARACTERS = 32


@dataclass(frozen=True)
class Completion:
    """What the target wrote behind prompt `index` of a call. tokens: its token ids. ended: whether the last one is an
    end token. count: how many it wrote, where `tokens` are read from a text."""

    index: int
    tokens: list[int]
    ended: bool
    count: int | None = None


# Takes prompts (token ids) and their seeds (unsigned, 64 bits); gives their completions as they come, in any order.
Generate = Callable[[Sequence[list[int]], Sequence[int]], Iterable[Completion]]


def open_answers(messages: Sequence[tuple[str, str]]) -> list[Message]:
    """The messages, with None as the content of every answer that the target is to give. Raises Unusable."""
    if all(role != "user" for role, _ in messages):
        raise Unusable("no_user_turn")
    found: list[Message] = []
    asked = False
    for role, content in messages:
        if role == "assistant" and not asked:
            raise Unusable("answer_unasked")
        found.append((role, None if role == "assistant" else content))
        asked = role == "user" or (asked and role != "assistant")
    return [*found, ("assistant", None)] if asked else found


@dataclass
class OpenConversation:
    """A conversation while its open turns are answered.

    digest: sha256 of the conversation as it was given. turn: the number of answers it has got. generated: the tokens of
    all its answers. reread: how many answers, read back as text, give other tokens than the target wrote. why: the
    reason it is left out, if it is; detail: as BadDocument's. unfinished: the last answer was cut, and kept. asked: the
    tokens before the answer that is due.
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
    asked: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, given: Conversation | BadDocument) -> "OpenConversation":
        if isinstance(given, BadDocument):
            return cls(given.name, given.digest, [], why=given.why, detail=given.detail)
        digest = messages_digest(given.messages)  # its own digest may be its file's
        try:
            return cls(given.name, digest, open_answers(given.messages))
        except Unusable as error:
            return cls(given.name, digest, [], why=error.why)

    @property
    def due(self) -> int | None:
        """The index of the message that is answered next; None where there is none."""
        if self.why is not None:
            return None
        return next((i for i, (_, content) in enumerate(self.messages) if content is None), None)

    @property
    def before(self) -> list[tuple[str, str]]:
        """The messages before the answer that is due."""
        return [(role, content) for role, content in self.messages[: self.due] if content is not None]

    def seed(self, seed: int) -> int:
        """The seed of the answer that is due, unsigned, 64 bits."""
        key = f"{seed}:{self.digest.hex()}:{self.turn}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def beginning(document: Document, least: int, most: int, tokenizer: Tokenizer) -> Conversation | BadDocument:
    """The document's first `least` to `most` tokens, as many as its own hash says, as a conversation that is to be
    answered; of a document no longer than that, or one that is no question, the reason.

    tokenizer: as `rust_tokenizer` gives it."""
    count = least + int.from_bytes(document.digest[:8], "little") % (most - least + 1)
    stop = _end_of(count, document.text, tokenizer)
    if not stop:
        return BadDocument(document.name, document.digest, "too_short")
    try:
        messages = check_messages([{"role": "user", "content": document.text[:stop]}], answered=False)
    except Unusable as error:
        return BadDocument(document.name, document.digest, error.why)
    return Conversation(document.name, messages_digest(messages), messages)


def _end_of(count: int, text: str, tokenizer: Tokenizer) -> int:
    """Where the text's first `count` tokens end, in characters; where these are a part of its first character, the end
    of that. 0 where nothing stands behind them."""
    size = MOST_CHARACTERS * (count + 1)
    while True:
        offsets = tokenizer.encode(text[:size], add_special_tokens=False).offsets
        behind = [begin for begin, _ in offsets[count:] if begin > 0]
        if size >= len(text):
            return behind[0] if behind else 0
        if len(behind) > 1:  # the last token may be half of one
            return behind[0]
        size *= 2  # a text of long tokens: blanks, lines of signs


def text_behind(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that the tokens add behind the prompt; decoded alone, a tokenizer whose words begin with a blank leaves
    out the first one. It is the Rust tokenizer's own: transformers may tidy up blanks."""
    begin = len(prompt) - 1
    while begin > 0 and UNFINISHED in tokenizer.decode([prompt[begin]], skip_special_tokens=False):
        begin -= 1
    head = list(prompt[max(begin, 0) :])
    before, whole = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (head, [*head, *tokens]))
    return whole[len(before) :]


class ChatTokens:
    """Turns conversations into prompts for the target, and what it writes into answers. keep_unfinished: an answer
    without an end is the conversation's last, not an error."""

    def __init__(self, encoder: ChatEncoder, max_prompt: int, keep_unfinished: bool = False):
        self._encoder, self._max_prompt, self._keep_unfinished = encoder, max_prompt, keep_unfinished
        self._plain = rust_tokenizer(encoder.serialised)
        self._control = frozenset(encoder.special.values()) | {encoder.eos_id}
        self._is_plain = encoder.template.endswith(PLAIN_TEMPLATE)

    def prompt(self, conversation: OpenConversation) -> list[int]:
        """The token ids of all that stands before the answer that is due. Raises Unusable."""
        conversation.asked = self._encoder.encode_prompt(conversation.before)
        if len(conversation.asked) > self._max_prompt:
            raise Unusable("prompt_too_long")
        return conversation.asked

    def take(self, conversation: OpenConversation, completion: Completion) -> None:
        """Write the completion into the conversation, as the answer that is due. Raises Unusable."""
        due = conversation.due
        assert due is not None
        if not completion.ended and not self._keep_unfinished:
            raise Unusable("unfinished")
        tokens = completion.tokens[:-1] if completion.ended else completion.tokens
        if not self._control.isdisjoint(tokens):
            raise Unusable("special_token_in_answer")
        # A chat's template may write the first blank, or take it away; a continuation has it.
        texts = [text_behind(self._plain, prompt, tokens) for prompt in ((), conversation.asked)]
        if not completion.ended:
            texts = [text.rstrip(UNFINISHED) for text in texts]  # a character that was cut
        written = texts[-1]
        if not written.strip():
            raise Unusable("empty_answer")
        if UNFINISHED in written or NONCHARACTERS.search(written):
            raise Unusable("not_text")
        if self._is_plain:
            texts.reverse()
        prompt = self._plain.decode(conversation.asked[-THOUGHT_TOKENS:], skip_special_tokens=False)
        if opened := THOUGHT.search(prompt):  # a template may have the opening in the prompt, and not in the answer
            texts.append(opened[0] + written)
        text, learned = self._read_back(conversation, texts, tokens, completion.ended)
        if not completion.ended:
            # A template may write beside what was cut: Qwen3's closes an empty thought before one that has no end.
            kept = self._plain.decode(learned, skip_special_tokens=False).strip()
            if not kept or not written.strip().startswith(kept):
                raise Unusable("unfinished")
        is_own = learned[: len(tokens)] == tokens and completion.count in (None, len(completion.tokens))
        conversation.reread += not is_own
        conversation.messages[due] = ("assistant", text)
        conversation.turn += 1
        if not completion.ended:
            conversation.unfinished = True
            del conversation.messages[due + 1 :]

    def _read_back(
        self, conversation: OpenConversation, texts: Sequence[str], tokens: list[int], ended: bool
    ) -> tuple[str, list[int]]:
        """The first of the texts that gives these tokens back as the answer, else the first that can be one, with the
        tokens that `prepare` makes of it. Raises Unusable."""
        found, refused = list[tuple[str, list[int]]](), None
        for text in dict.fromkeys(texts):
            messages = (*conversation.before, ("assistant", text))
            answered = Conversation(conversation.name, conversation.digest, messages, not ended)
            try:
                last = self._encoder.encode_document(answered)[-1]
            except Unusable as error:
                refused = refused or error
                continue
            begin, end = last.spans[-1]
            found.append((text, last.tokens[begin:end].tolist()))
            if found[-1][1][: len(tokens)] == tokens:
                return found[-1]
        if not found:
            assert refused is not None
            raise refused
        return found[0]


def answer_all(
    conversations: Sequence[OpenConversation],
    chat: ChatTokens,
    generate: Generate,
    seed: int,
    on_done: Callable[[OpenConversation], object],
) -> None:
    """Answer the first open turn of every conversation, then the second of those that have one, and so on.

    So all that can be decoded together is.

    on_done: is called with each conversation that is complete or left out, as it happens.
    """
    while waiting := [conversation for conversation in conversations if conversation.due is not None]:
        asked, prompts = [], []
        for conversation in waiting:
            try:
                prompts.append(chat.prompt(conversation))
                asked.append(conversation)
            except Unusable as error:
                conversation.why, conversation.detail = error.why, error.detail
                on_done(conversation)
        missing = set(range(len(asked)))
        for completion in generate(prompts, [conversation.seed(seed) for conversation in asked]) if asked else ():
            missing.remove(completion.index)
            conversation = asked[completion.index]
            conversation.generated += len(completion.tokens)
            try:
                chat.take(conversation, completion)
            except Unusable as error:
                conversation.why, conversation.detail = error.why, error.detail
            if conversation.due is None:
                on_done(conversation)
        assert not missing, f"{len(missing)} prompts were not answered"
