"""Prompts for measurements, made of any text: continue it, summarise it, copy it with edits.

Speculation lives from what the output repeats, so one kind of prompt says little. Not here: reading the text.
"""

import re
from collections import Counter
from collections.abc import Sequence

from longdraft.benchmarks.questions import Asked, Question
from longdraft.models.target import Target

KINDS = ("continue", "summarise", "edit")


def make_tasks(target: Target, texts: Sequence[list[int]], kinds: Sequence[str]) -> list[Asked]:
    """Every kind of task in turn, each on the next text, until the texts are used up.

    Args:
        texts: token ids of the target's tokenizer.
        kinds: of KINDS; all but "continue" need a tokenizer, and are chats where it has a chat template.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"tasks: {', '.join(unknown)} unknown; known: {', '.join(KINDS)}")
    asked = []
    for i, text in enumerate(texts):
        kind = kinds[i % len(kinds)]
        tokens = make_task(target, text, kind)
        asked.append(Asked(Question(i + 1, kind, (tokens,)), len(tokens)))
    return asked


def make_task(target: Target, text: list[int], kind: str) -> list[int]:
    """The prompt of one task on one text."""
    if kind == "continue":
        return list(text)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"tasks: {kind} needs a tokenizer, and this target has none; use continue")
    words = tokenizer.decode(text, skip_special_tokens=True)
    if kind == "summarise":
        ask = f"Summarise the following text in a few sentences.\n\n{words}"
    else:
        old = most_frequent_name(words)
        ask = f"Repeat the following text word for word, but write new_{old} wherever it says {old}.\n\n{words}"
    if not tokenizer.chat_template:
        return tokenizer(f"{ask}\n\n").input_ids
    chat = [{"role": "user", "content": ask}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def most_frequent_name(text: str) -> str:
    """The identifier or word of four letters and more that comes most often, the first of equals."""
    found = Counter(re.findall(r"[A-Za-z_]{4,}", text)).most_common(1)
    return found[0][0] if found else "text"
