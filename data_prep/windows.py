"""The tokens of a long text, made window by window: the same as one call gives, in memory that does not grow with it.

The Rust tokenizer holds over a hundred bytes for each character of a call. So a text of more than LONG characters is
tokenised in windows that overlap, and two windows are spliced in the overlap where they agree. Why that is one call's
result, with A the window before and B the one behind:

- A pre-tokenizer's pattern is matched from left to right, each match beginning where the one before ended. B begins
  where a word of A begins, so it matches on as A does; what A does not see lies to the right of its end, and a match
  that it decided differently for that would differ in B, which sees it. N_WORDS words behind the splice are the same in
  both, and no pattern looks over so many. Models work within words, so tokens are the same where words are.
- In a word that fills the overlap, BPE alone is spliced. Its tokens are right if each pair of neighbours, taken alone,
  gives just the two: the merges of a text that go over no border between its tokens are the merges of each pair, in the
  same order. At a splice between tokens that both windows have, each pair stands in A or in B. That needs the word to
  be the same word, so it is done where nothing is split into words, and in runs of letters, of digits, or of signs that
  begin behind a blank: a pattern can prolong them on the right and do nothing else.
- Normalisation crosses no character that begins a cluster of its own, and the splice stands before one.

Where there is no such place (a run of blanks, words of Unigram longer than the overlap) the window before is made anew,
twice as long, up to the whole text.
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

LONG = 1 << 21  # characters; up to here one call, of about 240 MB
WINDOW = 1 << 19
OVERLAP = 1 << 13
N_WORDS, N_TOKENS = 8, 16  # that agree on either side of a splice
SAMPLE = "A b, c1 2.\n\n  d\te'f 日本。語 é-g\r\n"
T = TypeVar("T")
SIGNS = re.compile(r"[^\s\w]+")


@dataclass(frozen=True)
class Window:
    """Characters [begin, end) of a text, of whose tokens [first, stop) are the text's.

    in_word: it begins within a word of the window before. A stop of None stands for the last token."""

    encoding: Encoding
    begin: int
    end: int
    in_word: bool = False
    first: int = 0
    stop: int | None = None

    @property
    def ids(self) -> np.ndarray:
        """Of the tokens that are the text's, int64 [n]."""
        return np.array(self.encoding.ids[self.first : self.stop], dtype=np.int64)

    @property
    def offsets(self) -> np.ndarray:
        """int64 [n, 2]: the characters of the text that each of these tokens stands for."""
        found = self.encoding.offsets[self.first : self.stop]
        return np.array(found, dtype=np.int64).reshape(-1, 2) + self.begin

    def table(self, first: int, stop: int) -> np.ndarray:
        """Of its tokens [first, stop), in columns of int64 [n, 4]: id, first character in the text and the one behind
        the last, and whether a word begins."""
        spans = [self.encoding.token_to_chars(i) or (0, 0) for i in range(first, stop)]
        words = [self.encoding.token_to_word(i) for i in range(max(0, first - 1), stop)]
        starts = [a != b for a, b in pairwise(words)]
        starts = starts if first else [True, *starts][: stop - first]
        chars = np.array(spans, dtype=np.int64).reshape(-1, 2) + self.begin
        return np.column_stack(
            [np.array(self.encoding.ids[first:stop], dtype=np.int64), chars, np.array(starts, dtype=np.int64)]
        )


class _Unstable(Exception):
    """A window's beginning depends on what lies behind its end."""


class WindowedTokenizer:
    """tokenizer: truncates and pads nothing."""

    def __init__(self, tokenizer: Tokenizer):
        self._rust = tokenizer

    def encode(self, text: str, take: Callable[[Window], T]) -> list[T]:
        """What `take` makes of the text's windows, in order, without the tokens that the tokenizer sets around a text.

        A window holds much memory, and lives no longer than the call of `take`."""
        if len(text) > LONG:
            try:
                return [take(window) for window in self._windows(text)]
            except _Unstable:
                pass
        return [take(self._window(text, 0, len(text)))]

    def _windows(self, text: str) -> Iterator[Window]:
        window = self._window(text, 0, WINDOW)
        while window.end < len(text):
            behind = self._next_window(text, window)
            splice = self._splice(text, window, behind) if behind else None
            if splice is None or behind is None or splice[0] < window.first:
                longer = self._window(text, window.begin, 2 * window.end - window.begin)
                n_same = window.first + N_TOKENS
                if longer.encoding.ids[:n_same] != window.encoding.ids[:n_same]:
                    raise _Unstable
                window = replace(window, encoding=longer.encoding, end=longer.end)
                continue
            stop, next_first, in_word = splice
            yield replace(window, stop=stop)
            window = replace(behind, in_word=in_word, first=next_first)
        yield window

    def _window(self, text: str, begin: int, end: int) -> Window:
        end = min(end, len(text))
        # Unlike `encode`, a batch lets other threads run.
        return Window(self._rust.encode_batch([text[begin:end]], add_special_tokens=False)[0], begin, end)

    def _tail(self, window: Window) -> np.ndarray:
        """The table of the tokens from OVERLAP characters before the window's end on."""
        n, count = len(window.encoding), N_TOKENS
        while True:
            count = min(n, 4 * count)
            last = window.table(n - count, n)
            inside = np.flatnonzero(last[:, 1] < window.end - OVERLAP)
            if len(inside) or count == n:
                return last[inside[-1] + 1 :] if len(inside) else last

    def _next_window(self, text: str, window: Window) -> Window | None:
        """Begins where a word does in the first half of the overlap, else where a token does."""
        tail = self._tail(window)
        begins, ends = tail[1:, 1], tail[:-1, 2]
        whole = (ends <= begins) & (ends < window.end - OVERLAP // 2)
        places = np.flatnonzero(whole & (tail[1:, 3] > 0))
        places = places if len(places) else np.flatnonzero(whole)
        if not len(places):
            return None
        begin = int(ends[places[0]])
        return self._window(text, begin, begin + WINDOW)

    def _splice(self, text: str, before: Window, behind: Window) -> tuple[int, int, bool] | None:
        """(Tokens of the one before that are taken, those of the one behind that are not, whether within a word)."""
        a = self._tail(before)
        b = behind.table(0, min(len(behind.encoding), 2 * len(a) + N_TOKENS))
        if not len(b):
            return None
        middle = before.end - OVERLAP // 2
        i, j = (int(np.argmax(tokens[:, 1] >= middle)) for tokens in (a, b))
        n_before, n_behind = min(i, j), min(len(a) - i, len(b) - j)
        tokens = a[i - n_before : i + n_behind]
        same = (tokens == b[j - n_before : j + n_behind]).all(axis=1)
        if not len(same) or not same[n_before]:
            return None
        others = np.flatnonzero(~same)
        low = int(others[others < n_before].max(initial=-1)) + 1
        high = int(others[others > n_before].min(initial=len(same)))
        tokens, starts = tokens[low:high], tokens[low:high, 3] > 0
        apart = np.concatenate([[False], tokens[:-1, 2] <= tokens[1:, 1]])
        apart[:N_TOKENS] = apart[len(apart) - min(N_TOKENS, len(apart)) :] = False
        n_starts = np.cumsum(starts)
        words = apart & starts & (n_starts > N_WORDS) & (n_starts[-1] - n_starts >= N_WORDS)
        place = self._nearest(text, tokens, words, middle)
        first = len(before.encoding) - len(a) + i - n_before + low
        in_word = place is None and self._may_cut_words(text, before, first)
        if in_word:
            place = self._nearest(text, tokens, apart, middle)
        if place is None:
            return None
        return first + place, j - n_before + low + place, in_word

    def _nearest(self, text: str, tokens: np.ndarray, allowed: np.ndarray, middle: int) -> int | None:
        places = np.flatnonzero(allowed)
        for place in places[np.argsort(np.abs(tokens[places, 1] - middle), kind="stable")]:
            if _begins_a_cluster(text[int(tokens[place, 1])]):
                return int(place)
        return None

    def _may_cut_words(self, text: str, window: Window, first: int) -> bool:
        """Whether a splice may stand at token `first` or behind it, within the window's last word."""
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
        """Whether the model is BPE whose tokens do not depend on where in its word a character stands, or on chance."""
        model = json.loads(self._rust.to_str())["model"]
        if model["type"] != "BPE":
            return False
        return not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))

    @cached_property
    def _splits(self) -> bool:
        """Whether texts are split into words."""
        if self._rust.pre_tokenizer is None:
            return False
        text = SAMPLE if self._rust.normalizer is None else self._rust.normalizer.normalize_str(SAMPLE)
        return len(self._rust.pre_tokenizer.pre_tokenize_str(text)) > 1


def _begins_a_cluster(char: str) -> bool:
    """Whether no normal form of Unicode joins it, or anything in it, to what stands before."""
    first = unicodedata.normalize("NFKD", char)[0]
    medial = 0x1160 <= ord(first) <= 0x11FF or 0xD7B0 <= ord(first) <= 0xD7FF  # vowels and finals of Hangul
    return not (medial or unicodedata.combining(first) or unicodedata.category(first)[0] == "M")
