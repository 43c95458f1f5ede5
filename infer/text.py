"""Tokens to text as they come, and stop strings across token borders. Not here: chat templates (infer/requests.py)."""

from collections.abc import Sequence

# What a tokenizer shows for bytes that are no whole character (yet); a character has at most 4 bytes.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_UNFINISHED = 3


def text_behind(tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip_special: bool = True) -> str:
    """The text that tokens add behind a prompt, whose own text is not in it. A word's space that is part of its token
    would be dropped at the beginning of a text."""
    head = _end_of(tokenizer, prompt)
    before, whole = (tokenizer.decode(ids, skip_special_tokens=skip_special) for ids in (head, [*head, *tokens]))
    return whole[len(before) :]


def _end_of(tokenizer, prompt: Sequence[int]) -> list[int]:
    """What the text behind a prompt depends on: its last token that is whole characters, and those behind it."""
    begin = len(prompt) - 1
    while begin > 0 and UNFINISHED in tokenizer.decode([prompt[begin]]):
        begin -= 1
    return list(prompt[max(begin, 0) :])


class TextReader:
    """The text of a growing list of tokens, without decoding all of it again for every token.

    A token's text depends on the one before it (a leading space, a character's bytes), so the last finished stretch is
    decoded again in front of the new tokens and taken off. Special tokens are no text. prompt: what they stand behind,
    where their text goes on from its own.

    Attributes:
        text: all that was read, but what may be within a character.
    """

    def __init__(self, tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._window = _end_of(tokenizer, prompt)  # tokens from the last finished stretch on
        self._finished = len(self._window)  # how many of them end with a whole character
        self._given = self._decode(self._window)  # of their text what is in `text`, or before it
        self.text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        before = len(self._window)
        self._window += tokens
        whole = self._decode(self._window)
        # The next tokens may change what is behind it.
        ready = max(len(whole.rstrip(UNFINISHED)), len(whole) - MOST_UNFINISHED)
        if whole.endswith(UNFINISHED) and not whole.startswith(self._given):
            return ""  # of tokens that are bytes, those of half a character undo the whole ones before them
        added = whole[len(self._given) : ready]
        self._given += added
        self.text += added
        if ready == len(whole):
            if added:
                self._window = self._window[self._finished :]
                self._finished, self._given = len(self._window), self._decode(self._window)
            elif before == self._finished:
                del self._window[before:]  # without text of their own, as special tokens are
        return added

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""


class StopStrings:
    """Watches a growing text for the first of some strings."""

    def __init__(self, tokenizer, strings: Sequence[str], prompt: Sequence[int] = ()):
        self._reader, self._strings = TextReader(tokenizer, prompt), tuple(strings)
        self._longest = max(map(len, strings))

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string; `text` then ends before it."""
        added = self._reader.push([token])
        if not added:
            return False
        text = self._reader.text
        found = _first(text, self._strings, max(0, len(text) - len(added) - self._longest + 1))
        if found is not None:
            self._reader.text = text[:found]
        return found is not None

    @property
    def text(self) -> str:
        """The text so far; after a stop, the text before the stop string."""
        return self._reader.text


class ShownText:
    """The text of a growing list of tokens for a reader: what may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer, stop_strings: Sequence[str] = (), prompt: Sequence[int] = ()):
        self._reader, self._strings = TextReader(tokenizer, prompt), tuple(stop_strings)
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """What can be shown now and could not before."""
        self._reader.push(tokens)
        text = self._reader.text
        end = _first(text, self._strings, self._shown)
        if end is None:
            end = len(text) - max((_begun(text, string) for string in self._strings), default=0)
        fresh = text[self._shown : end]
        self._shown += len(fresh)
        return fresh

    def finish(self, text: str) -> str:
        """The rest of the finished text, `Generation.text`."""
        rest = text[self._shown :]
        self._shown = len(text)
        return rest


def _first(text: str, strings: Sequence[str], start: int) -> int | None:
    """Where the first of these strings begins, from `start` on."""
    return min((at for at in (text.find(string, start) for string in strings) if at >= 0), default=None)


def _begun(text: str, string: str) -> int:
    """How many characters at the end of `text` are the beginning of `string`."""
    longest = min(len(string) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)
