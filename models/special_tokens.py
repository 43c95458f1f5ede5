"""A tokenizer's special tokens, and the tokens that end a text."""

import re
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PretrainedConfig

# What a chat template, which is a program in the checkpoint, may raise for messages that it was not written for.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
ANSWER = "zebra"  # the content of an answer, to be found in a rendered chat


@lru_cache(maxsize=4)  # some tokenizers have thousands
def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokenizer's special tokens: id to spelling."""
    return {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def chat_end(tokenizer: Any, template: str | None = None) -> int | None:
    """The token that ends an answer in a chat: the first special token that the template writes after the answer's
    content, as in the training loss (data_prep/chat.py). None if there is none.

    template: Jinja, instead of the tokenizer's own.
    """
    if not (template or tokenizer.chat_template):
        return None
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    except TEMPLATE_ERRORS:
        return None
    tokens = {spelling: token for token, spelling in special_tokens(tokenizer).items()}
    spellings = "|".join(re.escape(one) for one in sorted(tokens, key=len, reverse=True))
    found = re.search(spellings, text.rpartition(ANSWER)[2]) if ANSWER in text else None
    return tokens.get(found[0]) if found else None


def end_tokens(hf_config: PretrainedConfig, generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids of the tokens that end a text, in order.

    As in vLLM, they are those of the generation configuration and the tokenizer or, if these name none, those of the
    model's configuration. Otherwise an id that only the model's configuration names counts only if it is a special
    token of the tokenizer: a configuration class's default may be an ordinary word here. The token that ends an answer
    in a chat is added.

    generation: `eos_token_id` of the generation configuration: an id, several or None.
    """
    text_config = hf_config.get_text_config()
    of_config = getattr(hf_config, "eos_token_id", None)
    named = _ids(getattr(text_config, "eos_token_id", None) if of_config is None else of_config)
    found = _ids(generation) | (set() if tokenizer is None else _ids(tokenizer.eos_token_id))
    if found:
        named &= set() if tokenizer is None else special_tokens(tokenizer).keys()
    if tokenizer is not None:
        found |= _ids(chat_end(tokenizer))
    return tuple(sorted(token for token in found | named if 0 <= token < text_config.vocab_size))


def _ids(given: Any) -> set[int]:
    """An id, several or None as a set."""
    return set() if given is None else {given} if isinstance(given, int) else set(given)
