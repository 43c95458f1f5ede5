"""Decodes tokens to text as they come, and finds stop strings across token borders."""

from collections.abc import Sequence

# What a tokenizer shows for bytes that are not, or not yet, a whole character. A character has at most 4 bytes.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_UNFINISHED = 3


def text_behind(tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip_special: bool = True) -> str:
    """The text that tokens add to a prompt's text. They are decoded with the prompt's end before them: on their own,
    a leading space that is part of a token would be lost."""
    head = _end_of(tokenizer, prompt)
    before, text = (tokenizer.decode(ids, skip_special_tokens=skip_special) for ids in (head, [*head, *tokens]))
    return text[len(before) :]


def _end_of(tokenizer, prompt: Sequence[int]) -> list[int]:
    """The tokens of a prompt that the text after it depends on: from its last token of whole characters on."""
    begin = len(prompt) - 1
    while begin > 0 and UNFINISHED in tokenizer.decode([prompt[begin]]):
        begin -= 1
    return list(prompt[max(begin, 0) :])


class TextReader:
    """The text of a growing list of tokens, without decoding all of them again for every new token.

    A token's text depends on the one before it (a leading space, a character's bytes). So the last finished stretch of
    tokens is decoded again before the new ones, and its text is cut off. Special tokens have no text. `prompt`: the
    tokens before, if the text continues theirs.

    Attributes:
        text: the text so far, without bytes at its end that may become a character.
    """

    def __init__(self, tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._window = _end_of(tokenizer, prompt)  # the tokens from the last finished stretch on
        self._finished = len(self._window)  # the number of them in the stretch, which ends with a whole character
        self._emitted = self._decode(self._window)  # the part of their text that is in `text`, or is the prompt's
        self.text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        before = len(self._window)
        self._window += tokens
        decoded = self._decode(self._window)
        # The next tokens may change the text from here on.
        ready = max(len(decoded.rstrip(UNFINISHED)), len(decoded) - MOST_UNFINISHED)
        if decoded.endswith(UNFINISHED) and not decoded.startswith(self._emitted):
            return ""  # with byte tokens, half a character can turn the whole characters before it into bytes too
        added = decoded[len(self._emitted) : ready]
        self._emitted += added
        self.text += added
        if ready == len(decoded):
            if added:
                self._window = self._window[self._finished :]
                self._finished, self._emitted = len(self._window), self._decode(self._window)
            elif before == self._finished:
                del self._window[before:]  # tokens without text, such as special tokens
        return added

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""


class StopStrings:
    """Finds the first of some stop strings in a growing text."""

    def __init__(self, tokenizer, strings: Sequence[str], prompt: Sequence[int] = ()):
        self._reader, self._strings = TextReader(tokenizer, prompt), tuple(strings)
        self._longest = max(map(len, strings))

    def push(self, token: int) -> bool:
        """Add a token. Returns whether it completes a stop string; `text` then ends before that."""
        added = self._reader.push([token])
        if not added:
            return False
        text = self._reader.text
        place = _first(text, self._strings, max(0, len(text) - len(added) - self._longest + 1))
        if place is not None:
            self._reader.text = text[:place]
        return place is not None

    @property
    def text(self) -> str:
        """The text so far; after a stop, the text before the stop string."""
        return self._reader.text


class ShownText:
    """The text of a growing list of tokens as it can be shown: a possible beginning of a stop string is held back."""

    def __init__(self, tokenizer, stop_strings: Sequence[str] = (), prompt: Sequence[int] = ()):
        self._reader, self._strings = TextReader(tokenizer, prompt), tuple(stop_strings)
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the text that can be shown now and could not before."""
        self._reader.push(tokens)
        text = self._reader.text
        end = _first(text, self._strings, self._shown)
        if end is None:
            end = len(text) - max((_begun(text, string) for string in self._strings), default=0)
        fresh = text[self._shown : end]
        self._shown += len(fresh)
        return fresh

    def finish(self, text: str) -> str:
        """The rest of the finished text. `text` is all of it, `Generation.text`."""
        rest = text[self._shown :]
        self._shown = len(text)
        return rest


def _first(text: str, strings: Sequence[str], start: int) -> int | None:
    """Where the first of these strings in `text` begins, from `start` on; None if there is none."""
    return min((at for at in (text.find(string, start) for string in strings) if at >= 0), default=None)


def _begun(text: str, string: str) -> int:
    """How many characters at the end of `text` are the beginning of `string`."""
    longest = min(len(string) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)
