"""Turns conversations into token ids, with the spans that carry a loss.

The text is the conversation as rendered by the target's chat template; nothing is added before or after it. The loss
counts what the assistant writes: everything after the prompt of its turn, up to and including the token that ends the
turn (the token that stops generation), and none of the headers. Reasoning and tool calls are part of an answer.

The conversation before a turn is rendered with the generation prompt, and again with the answer: what the second text
adds to the first is the answer and its end. The end is the first special token after the content, else the first token
of any kind; if the template writes nothing there, EOS is added. A turn with tool calls ends before the text that the
template writes after a plain turn's end. An answer that was cut off follows its prompt unchanged and has no end.

A conversation is one sequence if it renders every turn like the conversation up to that turn. If not (reasoning models
drop the thoughts of earlier turns), it becomes several: each turn is in the longest conversation that renders it like
the conversation up to that turn, which is what decoding sees.

Special tokens spelled out in a message are plain text, as in tokenize.py. Added tokens that are not marked as special
(<think>, <tool_call>) are tokens wherever they occur, since the model writes them in its answers.
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

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
from longdraft.data_prep.documents import REASONING, WEIGHT, Conversation, Document, Message, TokenDocument, Unusable
from longdraft.data_prep.tokenize import Encoded, make_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]
Turn = tuple[str, Span]  # a rendered text, and (start, stop) of the answer that the loss counts, in characters
Render = Callable[..., str]  # ChatTemplate.render with a conversation's tools and options
REMEDY = "let the target answer (prepare regenerate)"
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
        self._writes_reasoning, self._has_thoughts, self._after_turn = self._probe()

    def describe(self) -> dict:
        """The settings that affect the tokens, besides the tokenizer's own hash, for plan and manifest."""
        return {
            "vocab_size": self.vocab_size,
            "eos_token_id": self.eos_id,
            "chat_template_sha256": hashlib.sha256(self.template.source.encode()).hexdigest(),
        }

    def encode_document(self, document: Document | Conversation | TokenDocument) -> list[Encoded]:
        """The conversation as one sequence, or as several, named `name#1`, `name#2`, ... by their last turns. Raises
        Unusable."""
        assert isinstance(document, Conversation), document.name
        messages, render = self._given(document.messages), self._renderer(document.tools, document.options)
        # The first message is never an answer: many templates refuse a prompt without messages.
        learned = [one["role"] == "assistant" and WEIGHT not in one for one in messages]
        answers = [i for i, counts in enumerate(learned) if counts and i > 0]
        if not answers:
            raise Unusable("no_assistant_turn")
        turns = [self._turn(render, messages[: i + 1], document.unfinished and i == answers[-1]) for i in answers]
        whole = turns[-1][0] if messages[-1]["role"] == "assistant" else render(messages)
        if all(whole.startswith(turn[:stop]) for turn, (_, stop) in turns):
            return [self._tokens(document.name, whole, [span for _, span in turns])]
        text, last, sequences = "", 0, dict[int, tuple[str, list[Span]]]()
        for i, (turn, span) in reversed([*enumerate(turns, start=1)]):
            if not text.startswith(turn[: span[1]]):
                text, last = turn, i
            sequences.setdefault(last, (text, []))[1].insert(0, span)
        return [self._tokens(f"{document.name}#{i}", *sequence) for i, sequence in sorted(sequences.items())]

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[dict] = (), options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of everything before the answer to these messages. Raises Unusable."""
        given, render = self._given(messages), self._renderer(tools, options)
        for i, message in enumerate(given, start=1):
            if "tool_calls" in message:
                _check_written(render, given[:i])
        return self._tokenizer.finish(self._tokenizer.encode(render(given, prompt=True)))[0].tolist()

    def _renderer(self, tools: Sequence[dict], options: Mapping[str, Any] | None) -> Render:
        guarded = self.template.guarded
        return partial(self.template.render, tools=guarded(tools), options=guarded(options))

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        """The messages guarded. Reasoning that the template does not write precedes the content as a thought.

        Raises Unusable if the template has no thoughts."""
        if not self._writes_reasoning and any(REASONING in one for one in messages):
            if not self._has_thoughts:
                detail = f"has reasoning, which the chat template does not write; {REMEDY}"
                raise Unusable("answer_beside_content", detail)
            messages = [_with_thought(one) for one in messages]
        return self.template.guarded(messages)

    def _probe(self) -> tuple[bool, bool, str]:
        """Whether the template writes the reasoning of a last answer; whether it knows thoughts, and writes one before
        the content or opens it in the prompt; and what it writes after the end of a turn."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            text = self.template.render(messages)
            text, end = self._with_end(text, _content_end(self.template.render, messages, text)[1])
            reasoned = messages[1] | {REASONING: ANSWER_END}
            thoughtful, thought = (
                self.template.render([messages[0], one]) for one in (reasoned, _with_thought(reasoned))
            )
            prompt = self.template.render(messages[:1], prompt=True)
        except Unusable:
            return False, False, ""
        keeps = ANSWER_END in thought or bool(THOUGHT.search(prompt))
        return ANSWER_END in thoughtful, keeps and THOUGHT_END in self.template.source, text[end:]

    def _turn(self, render: Render, messages: list[Message], cut: bool) -> Turn:
        """The text up to the last of these messages, which is the assistant's, with the loss on that message.

        cut: whether the answer is unfinished and so has no end to learn."""
        prompt = render(messages[:-1], prompt=True)
        if cut:
            answer = _after_opening(messages[-1]["content"], prompt).rstrip()
            return prompt + answer, (len(prompt), len(prompt) + len(answer))
        answer, end = self._answer(render, messages, prompt)
        return prompt + answer, (len(prompt), len(prompt) + end)

    def _answer(self, render: Render, messages: list[Message], prompt: str) -> tuple[str, int]:
        """The text that follows the prompt when the last of these messages answers it, and where its turn ends.

        Usually that is what the template writes, but some templates drop a thought that their prompt opens
        (DeepSeek-R1's), or expect its opening in the content, which may lack it (QwQ's). Then the rest of the thought
        and the answer are taken from the content. Others write the earlier messages differently once there is an answer
        (gpt-oss's drops what was thought before calls, Mistral v0.3's moves the system message); the answer is then
        rendered without these."""
        complete, content, calls = render(messages), messages[-1]["content"], messages[-1].get("tool_calls")
        opened, follows = THOUGHT.search(prompt), complete.startswith(prompt)
        # If the template drops the thought, an answer that opens one itself looks like the prompt's, but ends none.
        if opened and THOUGHT_END in content and not (follows and THOUGHT_END in complete[len(prompt) :]):
            place, at = _content_end(render, messages, complete)
            written = _after_opening(content[:place], prompt)
            answer, end = written + complete[at:], len(written)
        elif follows:
            answer = complete[len(prompt) :]
            end = 0 if calls else _content_end(render, messages, complete)[1] - len(prompt)
            if end < 0:
                raise Unusable("answer_not_found")
        elif (simpler := _simpler(messages)) != messages:
            return self._answer(render, simpler, render(simpler[:-1], prompt=True))
        else:
            detail = f"has an answer without the thought that the prompt opens; {REMEDY}" if opened else ""
            raise Unusable("prompt_not_kept", detail)
        if not calls:
            return self._with_end(answer, end)
        _check_written(render, messages)
        return answer, len(answer.removesuffix(self._after_turn))

    def _with_end(self, text: str, at: int) -> tuple[str, int]:
        """The text, whose last content ends at `at`, with an end of the turn, and where that ends."""
        if special := PLACEHOLDER.search(text, at):
            return text, special.end()
        if at < len(text):
            return text, at + 1  # include the token that contains this character
        text += placeholder(self.eos_id)
        return text, len(text)

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


def _content_end(render: Render, messages: list[Message], text: str) -> tuple[int, int]:
    """The end of the last message's content, without trailing blanks if possible: its place in the content, and in the
    rendered text. Raises Unusable if it cannot be found."""
    content = messages[-1]["content"]
    # Mark the end before the trailing blanks, which many templates strip. If that fails, mark it after them: Qwen3's
    # template strips the blanks of an answer that is all thought as leading ones.
    for place in (len(content.rstrip()), len(content)):
        marked = render([*messages[:-1], messages[-1] | {"content": content[:place] + ANSWER_END + content[place:]}])
        if marked.count(ANSWER_END) == 1 and marked.replace(ANSWER_END, "") == text:
            return place, marked.index(ANSWER_END)
    raise Unusable("answer_not_found")


def _check_written(render: Render, messages: list[Message]) -> None:
    """Raise Unusable unless the template writes content, reasoning and all calls of the last message."""
    last, marks = messages[-1], list[str]()

    def marked(text: str) -> str:
        marks.append(f"{ANSWER_END}{len(marks)}{ANSWER_END}")
        return text + marks[-1]

    calls = [
        call | {"function": call["function"] | {"name": marked(call["function"]["name"])}}
        for call in last["tool_calls"]
    ]
    said = {field: marked(last[field]) for field in (REASONING, "content") if last.get(field, "").strip()}
    text = render([*messages[:-1], last | {"tool_calls": calls} | said])
    if not all(mark in text for mark in marks):
        raise Unusable("answer_beside_content", "has tool calls, of which the chat template does not write all")


def _simpler(messages: list[Message]) -> list[Message]:
    """The messages without what the assistant thought before its earlier calls and answers; if there is nothing of it,
    without the system message."""
    earlier = [{field: value for field, value in one.items() if field != REASONING} for one in messages[:-1]]
    earlier = [one | {"content": ""} if "tool_calls" in one else one for one in earlier]
    has_system = messages[0]["role"] == "system" and len(messages) > 2
    return messages[1:] if has_system and earlier == messages[:-1] else [*earlier, messages[-1]]


def _with_thought(message: Message) -> Message:
    """The message with its reasoning as a thought before the content."""
    if REASONING not in message:
        return message
    rest = {field: value for field, value in message.items() if field != REASONING}
    return rest | {"content": f"<think>\n{message[REASONING]}\n</think>\n\n{message['content']}"}


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
