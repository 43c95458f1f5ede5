"""Tokenises a long text window by window: the tokens are those of one call, but memory does not grow with the text.

The Rust tokenizer holds over a hundred bytes for each character of a call. So a text of more than LONG characters is
tokenised in overlapping windows, and two windows are spliced at a place in the overlap where they agree. The result is
that of one call. Let window A come before window B:

- A pre-tokenizer matches its pattern from left to right, and each match begins where the previous one ended. B begins
  where a word of A begins, so it continues matching as A does. A does not see what lies to the right of its end; a
  match that A decided differently because of that would differ in B, which sees it. N_WORDS words after the splice are
  the same in both windows, and no pattern looks ahead that far. Models work within words, so equal words give equal
  tokens.
- Within a word that fills the overlap, a splice is made for BPE only. A sequence of BPE tokens is right if each pair of
  neighbours, tokenised alone, gives just these two tokens: the merges of a text that cross no border between its tokens
  are the merges of each pair, in the same order. At a splice between tokens that both windows have, each pair is in A
  or in B. This needs the word to be the same in both. So it is done where texts are not split into words, and in runs
  of letters, digits or signs that begin after a blank: a pattern can only prolong such a run on the right.
- Normalisation does not cross a character that begins a cluster of its own, and the splice stands before one.

If there is no such place (a run of blanks, or Unigram words longer than the overlap), window A is tokenised again with
twice its length, up to the whole text.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

LONG = 1 << 21  # characters; up to this length, one call is made, which takes about 240 MB
WINDOW = 1 << 19  # characters
OVERLAP = 1 << 13  # characters
N_WORDS, N_TOKENS = 8, 16  # words or tokens that must agree on either side of a splice
SAMPLE = "A b, c1 2.\n\n  d\te'f 日本。語 é-g\r\n"
T = TypeVar("T")
SIGNS = re.compile(r"[^\s\w]+")


@dataclass(frozen=True)
class Window:
    """Characters [begin, end) of a text, tokenised. Its tokens [first, stop) become tokens of the text.

    in_word: whether it begins within a word of the previous window. A stop of None keeps the tokens up to the end."""

    encoding: Encoding
    begin: int
    end: int
    in_word: bool = False
    first: int = 0
    stop: int | None = None

    @property
    def ids(self) -> np.ndarray:
        """Ids of the kept tokens, int64 [n]."""
        return np.array(self.encoding.ids[self.first : self.stop], dtype=np.int64)

    @property
    def offsets(self) -> np.ndarray:
        """Ranges of characters of the text that the kept tokens stand for, int64 [n, 2]."""
        in_window = self.encoding.offsets[self.first : self.stop]
        return np.array(in_window, dtype=np.int64).reshape(-1, 2) + self.begin

    def table(self, first: int, stop: int) -> np.ndarray:
        """A row for each of the tokens [first, stop), int64 [n, 4]. Columns: id, begin and end of its characters in the
        text, and whether a word begins there."""
        spans = [self.encoding.token_to_chars(i) or (0, 0) for i in range(first, stop)]
        words = [self.encoding.token_to_word(i) for i in range(max(0, first - 1), stop)]
        starts = [a != b for a, b in pairwise(words)]
        starts = starts if first else [True, *starts][: stop - first]
        chars = np.array(spans, dtype=np.int64).reshape(-1, 2) + self.begin
        return np.column_stack(
            [np.array(self.encoding.ids[first:stop], dtype=np.int64), chars, np.array(starts, dtype=np.int64)]
        )


class _Unstable(Exception):
    """A window's first tokens depend on characters after its end."""


class WindowedTokenizer:
    """Tokenises texts of any length. tokenizer: must neither truncate nor pad."""

    def __init__(self, tokenizer: Tokenizer):
        self._rust = tokenizer

    def encode(self, text: str, take: Callable[[Window], T]) -> list[T]:
        """Call `take` on each window of the text, in order, and return the results. No special tokens are added.

        A window holds much memory, so it must not outlive the call of `take`."""
        if len(text) > LONG:
            try:
                return [take(window) for window in self._windows(text)]
            except _Unstable:
                pass
        return [take(self._window(text, 0, len(text)))]

    def _windows(self, text: str) -> Iterator[Window]:
        window = self._window(text, 0, WINDOW)
        while window.end < len(text):
            following = self._next_window(text, window)
            splice = self._splice(text, window, following) if following else None
            if splice is None or following is None or splice[0] < window.first:
                longer = self._window(text, window.begin, 2 * window.end - window.begin)
                n_same = window.first + N_TOKENS
                if longer.encoding.ids[:n_same] != window.encoding.ids[:n_same]:
                    raise _Unstable
                window = replace(window, encoding=longer.encoding, end=longer.end)
                continue
            stop, next_first, in_word = splice
            yield replace(window, stop=stop)
            window = replace(following, in_word=in_word, first=next_first)
        yield window

    def _window(self, text: str, begin: int, end: int) -> Window:
        end = min(end, len(text))
        # Unlike `encode`, `encode_batch` lets other threads run.
        return Window(self._rust.encode_batch([text[begin:end]], add_special_tokens=False)[0], begin, end)

    def _tail(self, window: Window) -> np.ndarray:
        """The table of the window's tokens that begin in its last OVERLAP characters."""
        n, count = len(window.encoding), N_TOKENS
        while True:
            count = min(n, 4 * count)
            last = window.table(n - count, n)
            too_early = np.flatnonzero(last[:, 1] < window.end - OVERLAP)
            if len(too_early) or count == n:
                return last[too_early[-1] + 1 :] if len(too_early) else last

    def _next_window(self, text: str, window: Window) -> Window | None:
        """The window that begins at the first word in the first half of the overlap; without a word, at a token."""
        tail = self._tail(window)
        begins, ends = tail[1:, 1], tail[:-1, 2]
        separate = (ends <= begins) & (ends < window.end - OVERLAP // 2)  # tokens that share no character
        places = np.flatnonzero(separate & (tail[1:, 3] > 0))
        places = places if len(places) else np.flatnonzero(separate)
        if not len(places):
            return None
        begin = int(ends[places[0]])
        return self._window(text, begin, begin + WINDOW)

    def _splice(self, text: str, before: Window, after: Window) -> tuple[int, int, bool] | None:
        """Where to splice two windows: (tokens of the first one to keep, tokens of the second one to leave out, whether
        this is within a word). None if there is no place."""
        a = self._tail(before)
        b = after.table(0, min(len(after.encoding), 2 * len(a) + N_TOKENS))
        if not len(b):
            return None
        middle = before.end - OVERLAP // 2
        i, j = (int(np.argmax(tokens[:, 1] >= middle)) for tokens in (a, b))
        n_left, n_right = min(i, j), min(len(a) - i, len(b) - j)
        tokens = a[i - n_left : i + n_right]
        same = (tokens == b[j - n_left : j + n_right]).all(axis=1)
        if not len(same) or not same[n_left]:
            return None
        # The longest run of equal tokens around the middle.
        different = np.flatnonzero(~same)
        low = int(different[different < n_left].max(initial=-1)) + 1
        high = int(different[different > n_left].min(initial=len(same)))
        tokens, starts = tokens[low:high], tokens[low:high, 3] > 0
        separate = np.concatenate([[False], tokens[:-1, 2] <= tokens[1:, 1]])
        separate[:N_TOKENS] = separate[len(separate) - min(N_TOKENS, len(separate)) :] = False
        n_starts = np.cumsum(starts)
        words = separate & starts & (n_starts > N_WORDS) & (n_starts[-1] - n_starts >= N_WORDS)
        place = self._nearest(text, tokens, words, middle)
        first = len(before.encoding) - len(a) + i - n_left + low
        in_word = place is None and self._may_cut_words(text, before, first)
        if in_word:
            place = self._nearest(text, tokens, separate, middle)
        if place is None:
            return None
        return first + place, j - n_left + low + place, in_word

    def _nearest(self, text: str, tokens: np.ndarray, allowed: np.ndarray, middle: int) -> int | None:
        """The allowed token nearest to the middle of the overlap that begins a cluster of characters."""
        places = np.flatnonzero(allowed)
        for place in places[np.argsort(np.abs(tokens[places, 1] - middle), kind="stable")]:
            if _begins_a_cluster(text[int(tokens[place, 1])]):
                return int(place)
        return None

    def _may_cut_words(self, text: str, window: Window, first: int) -> bool:
        """Whether a splice may stand at or after token `first`, within the window's last word."""
        if not self._merges:
            return False
        if not self._splits:
            return True
        n = len(window.encoding)
        word = window.encoding.token_to_word(n - 1)
        span = None if word is None else window.encoding.word_to_tokens(word)
        if span is None or span[0] >= first or span[1] != n:
            return False
        chars = window.encoding.token_to_chars(span[0])
        assert chars is not None
        begin = window.begin + chars[0]
        trusted = begin == 0 or text[begin].isspace() or text[begin - 1].isspace()
        if not trusted and not (window.in_word and span[0] == 0):
            return False
        run = text[begin + 1 : window.end]
        return run.isalpha() or run.isdecimal() or SIGNS.fullmatch(run) is not None

    @cached_property
    def _merges(self) -> bool:
        """Whether the model is BPE without dropout and without affixes, which depend on a character's place in its
        word."""
        model = json.loads(self._rust.to_str())["model"]
        if model["type"] != "BPE":
            return False
        return not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))

    @cached_property
    def _splits(self) -> bool:
        """Whether the tokenizer splits texts into words."""
        if self._rust.pre_tokenizer is None:
            return False
        text = SAMPLE if self._rust.normalizer is None else self._rust.normalizer.normalize_str(SAMPLE)
        return len(self._rust.pre_tokenizer.pre_tokenize_str(text)) > 1


def _begins_a_cluster(char: str) -> bool:
    """Whether no Unicode normal form joins the character, or a part of it, to the character before."""
    first = unicodedata.normalize("NFKD", char)[0]
    medial = 0x1160 <= ord(first) <= 0x11FF or 0xD7B0 <= ord(first) <= 0xD7FF  # vowels and finals of Hangul
    return not (medial or unicodedata.combining(first) or unicodedata.category(first)[0] == "M")
