"""Grammars: the text that a request may generate, such as JSON of a schema.

At the root and at every node of a tree the grammar says which tokens may come next. That depends on the generated
tokens alone, so decoding with a grammar is as exact as without. Grammars are written in llguidance's dialect of Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), and its matchers read the tokens.
Shapes: B slots, N nodes, V vocabulary, W = ceil(V / 32) words of a mask.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance import hf as tokenizers
from torch import Tensor

from longdraft.infer.choice.grammar_trial import error_of
from longdraft.infer.tree import PAD, TokenTree
from longdraft.models.target import Target

# The blanks between two parts of JSON. Without a limit a model may write them without end.
BLANKS = r" ?|\n[ \t]{0,40}"
Matchers = Sequence[LLMatcher | None]


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that a JSON schema allows; {"type": "object"} allows every object. An object that names
    properties has no others, unless the schema has `additionalProperties`.

    Raises ValueError for a schema that is nested too deep.
    """
    return "start: " + json_rule(schema)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON texts of a schema, as part of a rule. Raises ValueError for one that is nested too deep."""
    try:
        written = json.dumps(schema)
        if '"allOf"' not in written:  # whose parts may name some of the properties each
            schema = _closed(schema)
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": BLANKS}})
    except RecursionError as error:
        raise ValueError("grammar: the schema is nested too deep; flatten it") from error


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name, of which models write more and more. As elsewhere, they must
    be asked for by `additionalProperties`."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions", "patternProperties"):
        if isinstance(parts := closed.get(name), Mapping):
            closed[name] = {key: _closed(part) for key, part in parts.items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(parts := closed.get(name), list):
            closed[name] = [_closed(part) for part in parts]
    for name in ("items", "additionalProperties"):
        if name in closed:
            closed[name] = _closed(closed[name])
    if "properties" in closed and not {"anyOf", "oneOf", "$ref", "patternProperties"} & closed.keys():
        closed.setdefault("additionalProperties", False)
    return closed


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that a regular expression matches as a whole, in the syntax of Rust's regex."""
    return "start: " + regex_rule(pattern)


def regex_rule(pattern: str) -> str:
    """Texts that a regular expression matches, as part of a rule."""
    return f"/{regex_to_lark(pattern, '')}/"


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of these texts alone."""
    return "start: " + " | ".join(map(json.dumps, choices))


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, size: int, ends: tuple[int, ...]) -> tuple[LLTokenizer, Mapping[str, int]]:
    """llguidance's form of a tokenizer, and its special tokens."""
    try:
        vocabulary = tokenizers.from_tokenizer(tokenizer, n_vocab=size, eos_token=list(ends))
    except ValueError as error:
        raise ValueError(f"grammar: this target's tokenizer cannot follow one: {error}") from error
    added = tokenizer.added_tokens_decoder.items()
    return vocabulary, {one.content: token for token, one in added if vocabulary.is_special_token(token)}


def _of(target: Target) -> tuple[Any, int, tuple[int, ...]]:
    if target.tokenizer is None or not target.eos_token_ids:
        raise ValueError("grammar: this needs a tokenizer and an end token, and the target lacks one; omit it")
    return target.tokenizer, target.model.config.vocab_size, tuple(sorted(target.eos_token_ids))


def matcher_of(target: Target, grammar: str) -> LLMatcher:
    """A matcher that has read nothing yet. It is compiled, which takes 1 to 100 ms, and for hostile grammars far longer
    (infer/choice/grammar_trial.py).

    Raises ValueError, which names `grammar`, if it is not one, and if the target's tokenizer cannot follow any.
    """
    matcher = LLMatcher(_vocabulary(*_of(target))[0], grammar, log_level=0)
    if error := error_of(matcher):
        raise ValueError(f"grammar: {error}")
    return matcher


def textless_tokens(target: Target) -> Mapping[str, int]:
    """The tokens that no text in a grammar stands for, only the token itself, written `<[id]>`.

    Raises ValueError if the target's tokenizer cannot follow a grammar.
    """
    return _vocabulary(*_of(target))[1]


def without_refused(tree: TokenTree, matchers: Matchers) -> TokenTree:
    """The tree, on the host, without the nodes that their slots' grammars do not allow, which need not be verified.

    matchers: of each slot, at its root; None for a slot without a grammar. They are not changed.
    """
    tokens, parents, classes = tree.lists.tokens, list[list[int]](), tree.lists.classes
    for of_slot, above, matcher in zip(tokens, tree.lists.parents, matchers, strict=True):
        allowed = range(len(above)) if matcher is None else {node for node, _ in _allowed(matcher, of_slot, above)}
        parents.append([parent if node in allowed else PAD for node, parent in enumerate(above)])
    lists = [tokens, parents, *([] if classes is None else [classes])]
    return TokenTree(*map(torch.tensor, lists)).take_lists(lists)


def allowed_tokens(tree: TokenTree, matchers: Matchers, vocab_size: int) -> Tensor:
    """int32 [B, N, W] on the CPU: bit v % 32 of word v // 32 says whether token v may follow the node. All may follow
    the nodes of a slot without a grammar, and nodes that are not allowed themselves. Arguments: as above."""
    words_BNW = np.full((*tree.tokens.shape, -(-vocab_size // 32)), -1, dtype=np.int32)
    slots = words_BNW, tree.lists.tokens, tree.lists.parents, matchers
    for words_NW, tokens, parents, matcher in zip(*slots, strict=True):
        for node, reached in _allowed(matcher, tokens, parents) if matcher is not None else ():
            words_NW[node] = np.frombuffer(reached.compute_bitmask(), dtype=np.int32, count=len(words_NW[node]))
    return torch.from_numpy(words_BNW)


def _allowed(matcher: LLMatcher, tokens: Sequence[int], parents: Sequence[int]) -> Iterator[tuple[int, LLMatcher]]:
    """The nodes of a trie that a grammar allows, each with a matcher that has read the path to it. That is a copy,
    because a matcher that gives up, on a text that is too complex for it, never recovers."""
    below = defaultdict[int, list[int]](list)
    for node, parent in enumerate(parents):
        below[parent].append(node)
    matcher, read, left = matcher.deep_copy(), 0, [(0, 0)]
    while left:
        node, depth = left.pop()
        if node:
            matcher.rollback(read - (depth - 1))
            read = depth - 1 + matcher.try_consume_tokens([tokens[node]])
        if read == depth:
            yield node, matcher
            left += [(child, depth + 1) for child in below[node]]


def masked(logits_BNV: Tensor, words_BNW: Tensor) -> Tensor:
    """The logits, with -inf for tokens that may not follow. words_BNW: `allowed_tokens`, on the logits' device."""
    bits = torch.arange(32, dtype=torch.int32, device=words_BNW.device)
    allowed_BNV = ((words_BNW[..., None] >> bits) & 1).flatten(-2)[..., : logits_BNV.shape[-1]]
    return logits_BNV.masked_fill(allowed_BNV == 0, -torch.inf)
