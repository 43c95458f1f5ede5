"""Tokens to text as they come, and stop strings across token borders. Not here: chat templates (infer/requests.py)."""

from collections.abc import Sequence

# What a tokenizer shows for bytes that are no whole character yet.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextReader:
    """The text of a growing list of tokens, without decoding all of it again for every token.

    A token's text depends on the one before it (a leading space, a character's bytes), so the last finished stretch is
    decoded again in front of the new tokens and taken off.
    """

    def __init__(self, tokenizer):
        self._tokenizer, self._tokens = tokenizer, []
        self._from = self._read = 0
        self.text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add; what ends within a character waits for the next ones."""
        self._tokens += tokens
        before = self._decode(self._tokens[self._from : self._read])
        whole = self._decode(self._tokens[self._from :])
        if len(whole) <= len(before) or whole.endswith(UNFINISHED):
            return ""
        self._from, self._read = self._read, len(self._tokens)
        self.text += whole[len(before) :]
        return whole[len(before) :]

    def finish(self) -> str:
        """What still waited, unfinished characters included."""
        before = self._decode(self._tokens[self._from : self._read])
        rest = self._decode(self._tokens[self._from :])[len(before) :]
        self._from = self._read = len(self._tokens)
        self.text += rest
        return rest

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class StopStrings:
    """Watches a growing text for the first of some strings."""

    def __init__(self, tokenizer, strings: Sequence[str]):
        self._reader, self._strings = TextReader(tokenizer), tuple(strings)
        self._longest = max(map(len, strings))

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string; `text` then ends before it."""
        added = self._reader.push([token])
        if not added:
            return False
        text = self._reader.text
        start = max(0, len(text) - len(added) - self._longest + 1)
        found = [at for at in (text.find(string, start) for string in self._strings) if at >= 0]
        if found:
            self._reader.text = text[: min(found)]
        return bool(found)

    @property
    def text(self) -> str:
        """The text so far; after a stop, the text before the stop string."""
        return self._reader.text
