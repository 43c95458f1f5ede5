"""Decodes tokens to text as they come, and finds stop strings across token borders."""

import re
from collections.abc import Sequence
from functools import lru_cache, partial

# What a tokenizer decodes invalid or incomplete UTF-8 to.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so after this many tokens an unfinished end is not going to be one.
MOST_HELD = 8
# Tokens of a prompt that are decoded with the first new ones. Some of them may have no text.
CONTEXT = 16


@lru_cache(maxsize=1 << 18)
def token_text(tokenizer, token: int) -> str:
    """The text that a token adds after another token (here after itself). A special token's text is its spelling."""
    alone, twice = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return twice[len(alone) :]


@lru_cache(maxsize=1 << 18)
def token_bytes(tokenizer, token: int) -> bytes:
    """The bytes of `token_text`, also of a token that is part of a character, if the vocabulary has its bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    text, spelled = token_text(tokenizer, token), tokenizer.convert_ids_to_tokens(token)
    if UNFINISHED not in text:
        return text.encode()
    if found := re.fullmatch("<0x([0-9A-F]{2})>", spelled):
        return bytes.fromhex(found[1])
    by_character = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(by_character[one] for one in spelled) if by_character.keys() >= set(spelled) else text.encode()


def text_after(tokenizer, prompt: Sequence[int], tokens: Sequence[int], skip_special: bool = True) -> str:
    """The text that tokens add to a prompt's text."""
    shown = ShownText(tokenizer, (), prompt, skip_special)
    for token in tokens:
        shown.push(token)
    return shown.finish()[0]


class ShownText:
    """The text of a growing list of tokens up to the first stop string, as it can be shown. Text that may become a stop
    string is held back, and so are bytes that may become a character.

    Only the last tokens are decoded, once without and once with the new one, so the cost of a token does not depend on
    the length of the text.

    Args:
        prompt: the tokens before, if the text continues theirs. Without them, a first token's leading space would be
            lost.
        skip_special: whether special tokens have no text.

    Attributes:
        stopped: whether a stop string was found. The text ends before it.
    """

    def __init__(self, tokenizer, stop_strings: Sequence[str] = (), prompt: Sequence[int] = (), skip_special=True):
        options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        self._decode, self._strings = partial(tokenizer.decode, **options), tuple(stop_strings)
        self._known, self._new = list(prompt[-CONTEXT:]), list[int]()  # the new tokens' text is not in `_text` yet
        self._known_text = self._decode(self._known).rstrip(UNFINISHED)  # the first new token may complete it
        self._text, self._shown, self.stopped = "", 0, False
        self._searched = False  # whether a stop string may end in the new tokens

    def push(self, token: int, searched: bool = True) -> str:
        """Add a token. Returns the text that can be shown now and could not before. searched: whether to look for a
        stop string that ends here."""
        self._searched = searched or (self._searched and bool(self._new))
        self._new.append(token)
        added, text = self._added(), self._text
        if added and (len(self._new) == MOST_HELD or not added.endswith(UNFINISHED)):
            self._known, self._new = self._new, []
            self._known_text, self._text = self._decode(self._known), text + added
        elif len(self._new) == MOST_HELD:  # special tokens
            self._new = []
        if len(self._text) > len(text):
            self._stop(text)
            if self.stopped:
                return self.finish()[1]
        end = len(self._text) - max((_begun(self._text, string) for string in self._strings), default=0)
        fresh = self._text[self._shown : end]
        self._shown += len(fresh)
        return fresh

    def finish(self) -> tuple[str, str]:
        """The full text, and the part that was not shown yet. No token will follow, so an incomplete character at the
        end becomes a replacement character, and the text held back with it may contain a stop string."""
        if not self.stopped:
            text = self._text
            self._text, self._new = text + self._added(), []
            self._stop(text)
        shown, self._shown = self._shown, len(self._text)
        return self._text, self._text[shown:]

    def _stop(self, before: str) -> None:
        """End the text at the first stop string. One that lies entirely in the text `before` came too early and is
        ignored."""
        begins = (self._text.find(string, max(0, len(before) - len(string) + 1)) for string in self._strings)
        if self._searched and (found := [place for place in begins if place >= 0]):
            self.stopped, self._text = True, self._text[: min(found)]

    def _added(self) -> str:
        """The text of the new tokens, which may end in an incomplete character."""
        if not self._new:
            return ""
        text = self._decode(self._known + self._new)
        if text.startswith(self._known_text):
            return text[len(self._known_text) :]
        return self._decode(self._new)  # for invalid bytes some decoders change the text before, too


def _begun(text: str, string: str) -> int:
    """How many characters at the end of `text` are the beginning of `string`."""
    longest = min(len(string) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)
