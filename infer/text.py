"""Decodes tokens to text as they come, and finds stop strings across token borders."""

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import islice

from longdraft.models.special_tokens import special_tokens

# What stands for bytes that are no character. A character has at most 4 bytes.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_BYTES = 4
# A byte token of SentencePiece's kind, and the letters for bytes in byte-level tokens (GPT-2's): a byte's own character
# if it is a visible one, and otherwise the next character from 256 on.
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*VISIBLE}))}


@lru_cache(maxsize=1 << 18)
def token_bytes(tokenizer, token: int) -> bytes:
    """The bytes that a token adds behind another one, here itself; a special token's are those of its spelling."""
    return TextReader(tokenizer, [token], skip_special=False).bytes_of(token)


@lru_cache(maxsize=4)
def _is_byte_level(tokenizer) -> bool:
    """Whether the tokens spell bytes, by the letters of BYTE_OF."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    steps = set() if decoder is None else {*re.findall(r'"type":"(\w+)"', decoder.__getstate__().decode())}
    return steps - {"Sequence", "Fuse"} == {"ByteLevel"}


class TextReader:
    """The text of a growing list of tokens. It is the same however the tokens are divided into pushes.

    Tokens are read as bytes, and the bytes as UTF-8: what can no longer become a character becomes U+FFFD at once, one
    for each broken beginning. So complete characters stay what they are beside broken ones; `tokenizer.decode` gives up
    all of a run of byte tokens for one that is missing.

    Args:
        prompt: the tokens before, if the text continues theirs. A leading space that is part of a token is no text
            without them.
        skip_special: whether special tokens have no text.

    Attributes:
        text: the text so far, without bytes at its end that may become a character.
    """

    def __init__(self, tokenizer, prompt: Sequence[int] = (), skip_special: bool = True):
        self._piece, self._skipped = tokenizer.convert_ids_to_tokens, special_tokens(tokenizer) if skip_special else {}
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)  # which would take blanks away
        self._byte_level = _is_byte_level(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: list[int] = []  # the last token that has text
        self.text = ""
        before = islice((token for token in reversed(prompt) if self._bytes(token) != b""), MOST_BYTES)
        self.push([*before][::-1])
        self.text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        data, words = bytearray(), list[int]()
        for token in tokens:
            known = self._bytes(token)
            if known is None:
                words.append(token)
            elif known:
                data += self._bytes_of_words(words) + known
                words, self._last = [], [token]
        added = self._utf8.decode(data + self._bytes_of_words(words))
        self.text += added
        return added

    def finish(self) -> str:
        """All of the text, now that no token will follow: bytes at its end that are no character become a mark."""
        self.text += self._utf8.decode(b"", final=True)
        return self.text

    def bytes_of(self, token: int) -> bytes:
        """The bytes that this token would add."""
        known = self._bytes(token)
        return self._bytes_of_words([token]) if known is None else known

    def _bytes(self, token: int) -> bytes | None:
        """A token's bytes: none if it has no text, None if they depend on the token before it."""
        piece = None if token in self._skipped else self._piece(token)
        if piece is None:
            return b""
        if self._byte_level:
            known = [BYTE_OF.get(letter, -1) for letter in piece]
            return piece.encode() if -1 in known else bytes(known)
        if (found := BYTE_TOKEN.fullmatch(piece)) and self._decode([token]) != piece:
            byte = bytes.fromhex(found[1])
            return byte if self._last or not byte.isascii() else None  # a leading space may be dropped
        return None

    def _bytes_of_words(self, tokens: list[int]) -> bytes:
        """The bytes of tokens that are no byte tokens, behind the last token that was read."""
        if not tokens:
            return b""
        before, text = self._decode(self._last), self._decode([*self._last, *tokens])
        self._last = tokens[-1:]
        return text[len(before) :].encode()


class ShownText:
    """The text of a growing list of tokens up to the first stop string, as it can be shown: what may become a stop
    string is held back.

    Args:
        prompt, skip_special: as of TextReader.

    Attributes:
        stopped: whether a stop string has come. The text ends before it.
    """

    def __init__(self, tokenizer, stop_strings: Sequence[str] = (), prompt: Sequence[int] = (), skip_special=True):
        self._reader, self._strings = TextReader(tokenizer, prompt, skip_special), tuple(stop_strings)
        self._shown, self.stopped = 0, False

    def push(self, token: int, searched: bool = True) -> str:
        """Add a token. Returns the text that can be shown now and could not before. searched: whether to look for a
        stop string that ends here."""
        added, text = self._reader.push([token]), self._reader.text
        if added and searched and self._strings:
            known = len(text) - len(added)  # a string that is wholly in there came too early and ends nothing
            places = (text.find(string, max(0, known - len(string) + 1)) for string in self._strings)
            if found := [place for place in places if place >= 0]:
                self.stopped, self._reader.text = True, text[: min(found)]
                return self.finish()[1]
        end = len(text) - max((_begun(text, string) for string in self._strings), default=0)
        fresh = text[self._shown : end]
        self._shown += len(fresh)
        return fresh

    def finish(self) -> tuple[str, str]:
        """The whole text, and the rest of it that was not shown."""
        text = self._reader.text if self.stopped else self._reader.finish()
        shown, self._shown = self._shown, len(text)
        return text, text[shown:]


def _begun(text: str, string: str) -> int:
    """How many characters at the end of `text` are the beginning of `string`."""
    longest = min(len(string) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)
