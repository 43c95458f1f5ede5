"""Tokenises rendered conversations, in which placeholders (chat_template.py) are the only special tokens."""

import json
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from longdraft.data_prep.chat_template import placeholder

BORDER = "\ufdd5"  # in a text to tokenise: no token crosses it


class Encoding(NamedTuple):
    """ids: ids of ChatTokenizer's own tokens. begins, ends: the range of characters of each token. All int64 [n]."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class ChatTokenizer:
    """The target's tokenizer, but with placeholders in place of its special tokens, so that no text can spell one.

    serialised: the target's Rust tokenizer as JSON. eos_id: gets a placeholder even if it is not a special token.
    """

    def __init__(self, serialised: str, eos_id: int):
        state = json.loads(serialised)
        added = state["added_tokens"]
        state |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        self._rust = Tokenizer.from_str(json.dumps(state))
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
        """(The target's ids without borders, int32 [m]; how many of the first 0, 1, ..., n tokens remain, [n + 1])."""
        ids = self._target_ids[encoding.ids]
        kept = ids >= 0
        return ids[kept].astype(np.int32), np.concatenate([[0], np.cumsum(kept)])
