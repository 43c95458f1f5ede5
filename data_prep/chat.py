"""Turns conversations into token ids, with the spans that carry a loss.

The text is the conversation as rendered by the target's chat template; nothing is added before or after it. The loss
counts what the assistant writes: everything after the prompt of its turn, up to and including the token that ends the
turn (the token that stops generation), and none of the headers.

The conversation before a turn is rendered with the generation prompt, and again with the answer: what the second text
adds to the first is the answer and its end. The end is the first special token after the content, else the first token
of any kind; if the template writes nothing there, EOS is added. An answer that was cut off follows its prompt unchanged
and has no end.

A conversation is one sequence if it renders every turn like the conversation up to that turn. If not (reasoning models
drop the thoughts of earlier turns), each turn becomes a sequence of its own, with the loss on its answer only, which is
what decoding sees.

Special tokens spelled out in a message are plain text, as in tokenize.py. Added tokens that are not marked as special
(<think>, <tool_call>) are tokens wherever they occur, since the model writes them in its answers.
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from longdraft.data_prep.chat_template import (
    ANSWER_END,
    BORDER,
    EDGE,
    GUARD,
    PLACEHOLDER,
    ChatTemplate,
    ChatTokenizer,
    Encoding,
    placeholder,
)
from longdraft.data_prep.documents import Conversation, Document, Unusable
from longdraft.data_prep.tokenize import Encoded, make_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]
Turn = tuple[str, Span]  # a rendered text, and (start, stop) of the answer that the loss counts, in characters
# The end of a prompt that opens a thought, which reasoning models continue.
THOUGHT, THOUGHT_END = re.compile(r"<think>\s*\Z"), "</think>"
# The template for texts that the target continued: the beginning, directly followed by the continuation and EOS.
PLAIN = "plain"
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"


class ChatEncoder:
    """Turns whole conversations into token ids. It can be pickled, for worker processes.

    Attributes: serialised, the Rust tokenizer as JSON; vocab_size; eos_id; template.

    Args:
        tokenizer: a loaded transformers tokenizer.
        template: Jinja, or PLAIN, which writes the BOS token first if the tokenizer does so; None: the tokenizer's own.
    Raises:
        ValueError: there is no template, it is not Jinja, or the tokenizer has no Rust form or no EOS token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", template: str | None = None):
        of_text = make_encoder(tokenizer, ends_documents=False)
        self.serialised, self.vocab_size, self.eos_id = of_text.serialised, of_text.vocab_size, of_text.eos_id
        if template is None:
            template = tokenizer.get_chat_template()
        elif template == PLAIN:
            template = ("{{ bos_token }}" if of_text.bos_ids else "") + PLAIN_TEMPLATE
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self.template = ChatTemplate(template, variables, special)
        self._tokenizer = ChatTokenizer(self.serialised, self.eos_id)

    def describe(self) -> dict:
        """The settings that affect the tokens, besides the tokenizer's own hash, for plan and manifest."""
        return {
            "vocab_size": self.vocab_size,
            "eos_token_id": self.eos_id,
            "chat_template_sha256": hashlib.sha256(self.template.source.encode()).hexdigest(),
        }

    def encode_document(self, document: Document | Conversation) -> list[Encoded]:
        """The conversation as one sequence, or as one per turn, named `name#1`, `name#2`, ... Raises Unusable."""
        assert isinstance(document, Conversation), document.name
        messages = self.template.guarded(document.messages)
        # The first message is never an answer: many templates refuse a prompt without messages.
        answers = [i for i, (role, _) in enumerate(messages) if role == "assistant" and i > 0]
        if not answers:
            raise Unusable("no_assistant_turn")
        turns = [self._turn(messages[: i + 1], document.unfinished and i == answers[-1]) for i in answers]
        whole = self._whole(messages, turns)
        if whole is not None:
            return [self._tokens(document.name, *whole)]
        return [self._tokens(f"{document.name}#{i}", text, [span]) for i, (text, span) in enumerate(turns, start=1)]

    def encode_prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of everything before the answer to these messages, each (role, content). Raises Unusable."""
        text = self.template.render(self.template.guarded(messages), prompt=True)
        return self._tokenizer.finish(self._tokenizer.encode(text))[0].tolist()

    def _turn(self, messages: list[tuple[str, str]], cut: bool) -> Turn:
        """The text up to the last of these messages, which is the assistant's, with the loss on that message.

        cut: whether the answer is unfinished and so has no end to learn."""
        prompt = self.template.render(messages[:-1], prompt=True)
        if cut:
            answer = _after_opening(messages[-1][1], prompt).rstrip()
            return prompt + answer, (len(prompt), len(prompt) + len(answer))
        answer, end = self._answer(messages, prompt)
        if special := PLACEHOLDER.search(answer, end):
            end = special.end()
        elif end < len(answer):
            end += 1  # include the token that contains this character
        else:
            answer += placeholder(self.eos_id)
            end = len(answer)
        return prompt + answer, (len(prompt), len(prompt) + end)

    def _answer(self, messages: list[tuple[str, str]], prompt: str) -> tuple[str, int]:
        """The text that follows the prompt when the last of these messages answers it, and where its content ends.

        Usually that is what the template writes, but some templates drop a thought that their prompt opens
        (DeepSeek-R1's), or expect its opening in the content, which may lack it (QwQ's). Then the rest of the thought
        and the answer are taken from the content. Others (Mistral v0.3's) put the system message into the last message,
        and only if that is a question; the answer is then rendered without it."""
        complete, content = self.template.render(messages), messages[-1][1]
        opened, follows = THOUGHT.search(prompt), complete.startswith(prompt)
        # If the template drops the thought, an answer that opens one itself looks like the prompt's, but ends none.
        if opened and THOUGHT_END in content and not (follows and THOUGHT_END in complete[len(prompt) :]):
            place, end = self._content_end(messages, complete)
            written = _after_opening(content[:place], prompt)
            return written + complete[end:], len(written)
        if follows:
            end = self._content_end(messages, complete)[1] - len(prompt)
            if end < 0:
                raise Unusable("answer_not_found")
            return complete[len(prompt) :], end
        if messages[0][0] == "system" and len(messages) > 2:
            return self._answer(messages[1:], self.template.render(messages[1:-1], prompt=True))
        detail = "has an answer without the thought that the prompt opens; let the target answer (prepare regenerate)"
        raise Unusable("prompt_not_kept", detail if opened else "")

    def _content_end(self, messages: list[tuple[str, str]], text: str) -> tuple[int, int]:
        """The end of the last message's content, without trailing blanks if possible: its place in the content, and in
        the rendered text. Raises Unusable if it cannot be found."""
        role, content = messages[-1]
        # Mark the end before the trailing blanks, which many templates strip. If that fails, mark it after them:
        # Qwen3's template strips the blanks of an answer that is all thought as leading ones.
        for place in (len(content.rstrip()), len(content)):
            marked = self.template.render([*messages[:-1], (role, content[:place] + ANSWER_END + content[place:])])
            if marked.count(ANSWER_END) == 1 and marked.replace(ANSWER_END, "") == text:
                return place, marked.index(ANSWER_END)
        raise Unusable("answer_not_found")

    def _whole(self, messages: list[tuple[str, str]], turns: list[Turn]) -> tuple[str, list[Span]] | None:
        """The whole conversation as one text, or None if it renders a turn differently from the turn alone."""
        text = turns[-1][0] if messages[-1][0] == "assistant" else self.template.render(messages)
        is_same = all(text.startswith(turn[:stop]) for turn, (_, stop) in turns)
        return (text, [span for _, span in turns]) if is_same else None

    def _tokens(self, name: str, text: str, spans: list[Span]) -> Encoded:
        encoding = self._tokenizer.encode(text)
        joined = [begin for begin, _ in spans if not self._is_border(text, encoding, begin)]
        if joined:
            # Decoding tokenises the prompt alone. If the tokens of the whole text differ from that, split the text.
            text, spans = _with_borders(text, spans, joined)
            encoding = self._tokenizer.encode(text)
        # A token counts if any of its characters is in the span.
        firsts = np.searchsorted(encoding.ends, [begin for begin, _ in spans], side="right")
        stops = np.searchsorted(encoding.begins, [end for _, end in spans], side="left")
        tokens, n_kept = self._tokenizer.finish(encoding)
        token_spans = tuple((int(n_kept[first]), int(n_kept[stop])) for first, stop in zip(firsts, stops, strict=True))
        return Encoded(name, tokens, token_spans)

    def _is_border(self, text: str, encoding: Encoding, at: int) -> bool:
        """Whether the tokens of text[:at], tokenised alone, are the first tokens of the whole text.

        A special token splits the text for the tokenizer, so only the text from the last one before `at` is compared.
        """
        begin = max(0, text.rfind(EDGE, 0, max(0, text.rfind(EDGE, 0, at))))
        alone = self._tokenizer.encode(text[begin:at]).ids
        first = int(np.searchsorted(encoding.ends, begin, side="right"))
        stop = first + len(alone)
        same = np.array_equal(encoding.ids[first:stop], alone)
        return same and (stop == len(encoding.ids) or int(encoding.begins[stop]) >= at)


def _after_opening(content: str, prompt: str) -> str:
    """A guarded content without guards, and without the opening of a thought if the prompt ends with it."""
    content = content.replace(GUARD, "")
    if opened := THOUGHT.search(prompt):
        return re.sub(rf"\A(?:{re.escape(opened[0])}|\s*<think>)", "", content)
    return content


def _with_borders(text: str, spans: list[Span], at: list[int]) -> tuple[str, list[Span]]:
    """Insert BORDER at these places, and shift the spans accordingly; a span starts after a border at its start."""
    cuts = [0, *at, len(text)]
    text = BORDER.join(text[begin:end] for begin, end in pairwise(cuts))
    return text, [(begin + bisect_right(at, begin), end + bisect_left(at, end)) for begin, end in spans]
