"""Tokenises rendered conversations, in which placeholders (chat_template.py) are the only special tokens."""

import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tokenizers import AddedToken, Tokenizer

from longdraft.data_prep.chat_template import placeholder
from longdraft.data_prep.documents import Unusable

BORDER = "\ufdd5"  # in a text to tokenise: no token crosses it


@dataclass(frozen=True)
class Encoding:
    """ids: ids of ChatTokenizer's own tokens. begins, ends: the range of characters of each token. All int64 [n]."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class ChatTokenizer:
    """The target's tokenizer, but with placeholders in place of its special tokens, so that no text can spell one.

    serialised: the target's Rust tokenizer as JSON. eos_id: gets a placeholder even if it is not a special token.
    unk_id: the one special token that plain text may give.
    """

    def __init__(self, serialised: str, eos_id: int, unk_id: int | None):
        state = json.loads(serialised)
        added = state["added_tokens"]
        state |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._rust = Tokenizer.from_str(json.dumps(state))
        # Special tokens that are in the model's own vocabulary: plain text could still give them.
        in_model = [self._rust.token_to_id(token["content"]) for token in added if token["special"]]
        self._forbidden = np.array([token for token in in_model if token not in (None, unk_id)], dtype=np.int64)
        target_ids, tokens = {BORDER: -1}, [AddedToken(BORDER, normalized=False)]
        for token in added:
            flags = {name: token[name] for name in ("lstrip", "rstrip", "normalized", "single_word")}
            spelling = token["content"]
            if token["special"]:
                spelling, flags = placeholder(token["id"]), flags | {"normalized": False, "single_word": False}
            target_ids[spelling] = token["id"]
            tokens.append(AddedToken(spelling, **flags))
        if placeholder(eos_id) not in target_ids:
            target_ids[placeholder(eos_id)] = eos_id
            tokens.append(AddedToken(placeholder(eos_id), normalized=False))
        self._rust.add_tokens(tokens)
        self._target_ids = np.arange(max(self._rust.get_vocab(with_added_tokens=True).values()) + 1)
        for spelling, target_id in target_ids.items():
            self._target_ids[self._rust.token_to_id(spelling)] = target_id

    def encode(self, text: str) -> Encoding:
        encoding = self._rust.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return Encoding(np.array(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])

    def finish(self, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """(The target's ids without borders, int32 [m]; how many of the first 0, 1, ..., n tokens are kept, [n + 1]).

        Raises Unusable if plain text gave a special token.
        """
        if np.isin(encoding.ids, self._forbidden).any():
            raise Unusable("special_token_in_text")
        ids = self._target_ids[encoding.ids]
        kept = ids >= 0
        return ids[kept].astype(np.int32), np.concatenate([[0], np.cumsum(kept)])


chat_tokenizer = lru_cache(maxsize=1)(ChatTokenizer)  # reading a tokenizer takes about a second
