"""Conversations become token ids, with the spans of them that the loss counts. The encoder can be pickled for workers.

The text is what the target's chat template makes of the conversation; nothing is added before or behind it. The loss
counts what the assistant writes: all that stands behind the prompt of its turn, up to and with the token that ends the
turn (the first token behind an answer is what stops generation), and nothing of the headers.

Where an answer begins and ends is found by rendering. A template that marks answers by {% generation %} is taken at its
word. For others the conversation up to a turn is rendered with the generation prompt, and again with the answer: the
first must begin the second, and the end is the first special token behind the content (the first token of any kind
where the template writes no special one there; EOS, added, where it writes nothing). If what each turn shows also
begins the whole conversation, that is one sequence. If not (models that think drop the reasoning of earlier turns),
each turn becomes a sequence of its own, with the loss on its own answer alone: just what decoding sees.

Special tokens spelled out in a message are plain text, as in tokenize.py; tokens that a tokenizer adds without calling
them special (<think>, <tool_call>) are tokens wherever they stand, since the model writes them in its answers. Roles
other than system, user and assistant, tools and reasoning beside the content are not here (documents.py refuses them).
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Tokenizer

from longdraft.data_prep.chat_template import EDGE, STAND_IN, ChatTemplate, stand_in
from longdraft.data_prep.documents import Conversation, Document, Unusable
from longdraft.data_prep.tokenize import Encoded, checked_eos
from longdraft.data_prep.windows import WindowedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]
BORDER = "\ufdd5"  # in a text to tokenise: no token goes over it
# The template of texts that are continued (responses.py): beginning and continuation, one behind the other.
PLAIN = "plain"
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message.role != 'assistant' %}{{ message.content }}{% else %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class MarkedText:
    """text: with stand-ins for special tokens (chat_template.py). spans: what the loss counts of it, in characters."""

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class ChatEncoder:
    """Makes token ids of whole conversations; it can be pickled.

    serialised: the Rust tokenizer as JSON. unk_id: its unknown token, if any. template, variables, special: as
    ChatTemplate's.
    """

    serialised: str
    vocab_size: int
    eos_id: int
    unk_id: int | None
    template: str
    variables: dict[str, str]
    special: dict[str, int]

    def describe(self) -> dict:
        """For plan and manifest: all that decides the tokens besides the tokenizer's own hash."""
        return {
            "vocab_size": self.vocab_size,
            "bos_token_ids": [],
            "eos_token_id": self.eos_id,
            "documents_end_with_eos": False,
            "chat_template_sha256": hashlib.sha256(self.template.encode()).hexdigest(),
        }

    def encode_document(self, document: Document | Conversation) -> list[Encoded]:
        """The conversation as one sequence, or as one a turn, named `name#1`, `name#2`, ... Raises Unusable."""
        assert isinstance(document, Conversation), document.name
        messages = self._template.guarded(document.messages)
        # An answer that nothing stands before is no answer: many templates refuse a prompt of no messages.
        places = [i for i, (role, _) in enumerate(messages) if role == "assistant" and i > 0]
        if not places:
            self._template.render(messages)  # its own refusal says more
            raise Unusable("no_assistant_turn")
        turns = [self._turn(messages[: i + 1]) for i in places]
        if document.unfinished:
            turns[-1] = self._cut(turns[-1], messages)
        whole = self._whole(messages, turns)
        if whole is not None:
            return [self._tokens(document.name, whole)]
        return [self._tokens(f"{document.name}#{i}", turn) for i, turn in enumerate(turns, start=1)]

    def encode_prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """All that stands before the answer to these messages, (role, content) each. Raises Unusable."""
        rendered = self._template.render(self._template.guarded(messages), prompt=True)
        return self._tokenizer.finish(self._tokenizer.encode(rendered.text))[0].tolist()

    def _turn(self, messages: list[tuple[str, str]]) -> MarkedText:
        """What the model has seen once the last of these messages, which is the assistant's, is complete."""
        prompt = self._template.render(messages[:-1], prompt=True)
        complete = self._template.render(messages)
        if self._template.marks_answers:
            spans = complete.marked[len(prompt.marked) :]  # the earlier ones are the earlier turns'
            if not spans:
                raise Unusable("answer_not_found")
            return MarkedText(complete.text, spans)
        if not complete.text.startswith(prompt.text):
            raise Unusable("prompt_not_kept")
        begin = len(prompt.text)
        text, end = complete.text, self._content_end(messages, complete.text)
        if end < begin:
            raise Unusable("answer_not_found")
        if special := STAND_IN.search(text, end):
            return MarkedText(text, [(begin, special.end())])
        if end < len(text):
            return MarkedText(text, [(begin, end + 1)])  # the token that this character is in
        text += stand_in(self.eos_id)
        return MarkedText(text, [(begin, len(text))])

    def _cut(self, turn: MarkedText, messages: list[tuple[str, str]]) -> MarkedText:
        """The last turn up to the end of its content."""
        end = self._content_end(messages, turn.text)
        spans = [(begin, min(stop, end)) for begin, stop in turn.spans if begin < end]
        if not spans:
            raise Unusable("answer_not_found")
        return MarkedText(turn.text[:end], spans)

    def _content_end(self, messages: list[tuple[str, str]], text: str) -> int:
        """Where the last content ends in the rendered text; -1 where that cannot be told."""
        content = messages[-1][1]
        # Before the blanks at its end, which many templates take away; behind them, where a template takes them away
        # as blanks at the beginning (Qwen3's, of an answer that is all thought).
        for place in (len(content.rstrip()), len(content)):
            probed = self._template.render(messages, mark_at=place)
            if probed.text == text and len(probed.answer_ends) == 1:
                return probed.answer_ends[0]
        return -1

    def _whole(self, messages: list[tuple[str, str]], turns: list[MarkedText]) -> MarkedText | None:
        """The whole conversation as one text, if it shows at each turn what the turn alone shows; else None."""
        ends_here = messages[-1][0] == "assistant"
        text = turns[-1].text if ends_here else self._template.render(messages).text
        if all(text.startswith(turn.text[: turn.spans[-1][1]]) for turn in turns):
            return MarkedText(text, [span for turn in turns for span in turn.spans])
        return None

    def _tokens(self, name: str, marked: MarkedText) -> Encoded:
        text, spans = marked.text, marked.spans
        encoding = self._tokenizer.encode(text)
        loose = [begin for begin, _ in spans if not self._is_border(text, encoding, begin)]
        if loose:
            # Decoding tokenises the prompt alone; so here too, where the whole text's tokens would be others.
            text, spans = _with_borders(text, spans, loose)
            encoding = self._tokenizer.encode(text)
        # A token counts if any character of it is in the span.
        firsts = np.searchsorted(encoding.ends, [begin for begin, _ in spans], side="right")
        lasts = np.searchsorted(encoding.begins, [end for _, end in spans], side="left")
        tokens, moved = self._tokenizer.finish(encoding)
        found = tuple((int(moved[first]), int(moved[last])) for first, last in zip(firsts, lasts, strict=True))
        return Encoded(name, tokens, found)

    def _is_border(self, text: str, encoding: "Encoding", at: int) -> bool:
        """Whether the tokens of text[:at] alone begin the tokens of the text.

        A special token parts the text, so what stands behind the last one before `at` is compared.
        """
        begin = max(0, text.rfind(EDGE, 0, max(0, text.rfind(EDGE, 0, at))))
        alone = self._tokenizer.encode(text[begin:at]).ids
        first = int(np.searchsorted(encoding.ends, begin, side="right"))
        stop = first + len(alone)
        same = np.array_equal(encoding.ids[first:stop], alone)
        return same and (stop == len(encoding.ids) or int(encoding.begins[stop]) >= at)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.template, self.variables, self.special)

    @property
    def _tokenizer(self) -> "StandInTokenizer":
        return stand_in_tokenizer(self.serialised, self.eos_id, self.unk_id)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key != "_template"}


@dataclass(frozen=True)
class Encoding:
    """ids: token ids of the stand-in tokenizer. begins, ends: the characters of each token. All int64 [n]."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class StandInTokenizer:
    """The tokenizer with its special tokens spelled as stand-ins, so that no text can spell one.

    eos_id: gets a stand-in whether or not it is among the special tokens. unk_id: the special
    token that any text may give.
    """

    def __init__(self, serialised: str, eos_id: int, unk_id: int | None):
        state = json.loads(serialised)
        added = state["added_tokens"]
        state |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._rust = Tokenizer.from_str(json.dumps(state))
        # Of the special tokens those in the model's own vocabulary.
        reached = [self._rust.token_to_id(token["content"]) for token in added if token["special"]]
        self._never = np.array([token for token in reached if token not in (None, unk_id)], dtype=np.int64)
        tokens = {BORDER: (-1, AddedToken(BORDER, normalized=False))}
        for token in added:
            sides = {"lstrip": token["lstrip"], "rstrip": token["rstrip"]}
            if token["special"]:
                spelling, flags = stand_in(token["id"]), {"normalized": False}
            else:
                spelling, flags = token["content"], {name: token[name] for name in ("normalized", "single_word")}
            tokens[spelling] = (token["id"], AddedToken(spelling, **sides, **flags))
        tokens.setdefault(stand_in(eos_id), (eos_id, AddedToken(stand_in(eos_id), normalized=False)))
        self._rust.add_tokens([token for _, token in tokens.values()])
        self._windowed = WindowedTokenizer(self._rust)
        ids = {self._rust.token_to_id(spelling): token for spelling, (token, _) in tokens.items()}
        self._ids = np.arange(max(self._rust.get_vocab(with_added_tokens=True).values()) + 1)
        for ours, theirs in ids.items():
            assert ours is not None
            self._ids[ours] = theirs

    def encode(self, text: str) -> Encoding:
        pieces = self._windowed.encode(text, lambda kept: (kept.ids, kept.offsets))
        offsets = np.concatenate([offsets for _, offsets in pieces])
        return Encoding(np.concatenate([ids for ids, _ in pieces]), offsets[:, 0], offsets[:, 1])

    def finish(self, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """(Token ids of the target without borders, int32 [m]; how many of the first 0 to n tokens remain, [n + 1]).

        Raises Unusable where plain text gave a special token.
        """
        if np.isin(encoding.ids, self._never).any():
            raise Unusable("special_token_in_text")
        ids = self._ids[encoding.ids]
        kept = ids >= 0
        return ids[kept].astype(np.int32), np.concatenate([[0], np.cumsum(kept)])


@lru_cache(maxsize=1)  # reading a tokenizer takes about a second
def stand_in_tokenizer(serialised: str, eos_id: int, unk_id: int | None) -> StandInTokenizer:
    """The same for the same arguments."""
    return StandInTokenizer(serialised, eos_id, unk_id)


def make_chat_encoder(tokenizer: "PreTrainedTokenizerFast", template: str | None = None) -> ChatEncoder:
    """The encoder for a loaded transformers tokenizer, with its own chat template or, where given, with `template`:
    Jinja, or PLAIN, behind the tokenizer's BOS token where its texts begin with one.

    Raises ValueError where there is no template, one that cannot be read, no Rust form or no EOS token.
    """
    eos_id = checked_eos(tokenizer)
    if template is None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"{name} has no chat template, so conversations have no form; give the one it was trained with by "
                "--chat-template FILE (Jinja), or prepare plain text, without --chat-field"
            )
        template = tokenizer.get_chat_template()
    elif template == PLAIN:
        template = PLAIN_TEMPLATE
        if tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
            template = "{{ bos_token }}" + template
    rust = tokenizer.backend_tokenizer
    special = {token.content: i for i, token in rust.get_added_tokens_decoder().items() if token.special}
    variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    ChatTemplate(template, variables, special)  # is it Jinja?
    unk_id = tokenizer.unk_token_id
    assert unk_id is None or isinstance(unk_id, int)
    return ChatEncoder(rust.to_str(), len(tokenizer), eos_id, unk_id, template, variables, special)


def _with_borders(text: str, spans: list[Span], at: list[int]) -> tuple[str, list[Span]]:
    """The text with BORDER at these places, and the spans moved with it, each of which begins behind its border."""
    cuts = [0, *at, len(text)]
    text = BORDER.join(text[begin:end] for begin, end in pairwise(cuts))
    return text, [(begin + bisect_right(at, begin), end + bisect_left(at, end)) for begin, end in spans]
