"""The grammar of a chat's answer, for bodies that ask for a format of the text or for calls of tools.

The target may think first, as its chat template has it. Then comes a text of the asked format, or calls in the form
that infer/server/answer_format.py knows. Grammars are in llguidance's dialect of Lark, where `<[7]>` is token 7.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from longdraft.infer.choice.grammar import json_rule, regex_rule, textless_tokens
from longdraft.infer.server.answer_format import PROMPT_END, WrittenAnswer, WrittenCalls, argument_types, referred
from longdraft.models.schema import short_repr
from longdraft.models.target import Target

Tools = Sequence[Mapping[str, Any]]


def answer_grammar(
    target: Target, written: WrittenAnswer, prompt: Sequence[int], content: str | None, tools: Tools, several: bool
) -> str:
    """The grammar of an answer.

    Args:
        written: how the target writes it.
        prompt: its token ids. It may open the thought, or open and close one without content.
        content: the grammar of the answer's text; None if the answer must be a call.
        tools: those that may be called; may be empty. several: whether more than one may be.
    """
    rules, answers = [r"ANY: /(?s:.*)/", r"BLANKS: /\s{0,4}/"], list[str]()
    if content is not None:
        answers.append(f"{_spelled(target, written.header)} %lark {{\n{content}\n}}")
    if tools:
        assert written.calls is not None
        rules += _call_rules(target, written.calls, tools)
        first, between, last = (_spelled(target, text) for text in written.calls.around)
        more = f"({between} call)*" if several and written.calls.repeats else ""
        answers.append(f"{first} call {more} {last}")
    thought, end = "", target.tokenizer.decode(prompt[-PROMPT_END:], clean_up_tokenization_spaces=False).rstrip()
    if written.thought is not None and not end.endswith(written.thought[1]):
        opened, closed, after = written.thought
        rules.append(_text_until(target, "thought", closed))
        thought = f"thought {_spelled(target, after) or 'BLANKS'}"
        thought = thought if end.endswith(opened) else f"({_spelled(target, opened)} {thought})?"
    return "\n".join([f"start: {thought} answer", "answer: " + " | ".join(answers), *rules])


def _call_rules(target: Target, written: WrittenCalls, tools: Tools) -> list[str]:
    """The rule `call`, which is a call of any of the tools, and those that it needs."""
    calls, values = list[str](), dict[str, str]()
    for i, tool in enumerate(tools):
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        if not re.fullmatch(r"[\w.:/-]+", name):
            raise ValueError(
                f"tools: a call of {short_repr(name)} cannot be asked for; name it by letters, digits, _ and -"
            )
        if not isinstance(schema, dict):
            raise ValueError(f"tools: {name}: the parameters are no JSON schema of an object; correct them")
        schema = schema | {"type": "object"}
        arguments = _parameters(target, written.parameter, schema, values) if written.parameter else json_rule(schema)
        forms = list[str]()
        for form in filter(None, (written.call, written.other)):
            before, _, after = form.partition("ARGUMENTS")
            forms.append(f"{_spelled(target, before.replace('NAME', name))} arguments_{i} {_spelled(target, after)}")
        calls += [f"call_{i}: " + " | ".join(forms), f"arguments_{i}: {arguments}"]
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools))), *calls]
    if written.parameter:
        rules.append(_text_until(target, "text", written.parameter.partition("VALUE")[2]))
    return [*rules, *(f"{name}: {value}" for value, name in values.items())]


def _parameters(target: Target, template: str, schema: Mapping[str, Any], values: dict[str, str]) -> str:
    """The parameters of a call that writes one after the other, texts without quotes.

    template: of one. values: rules of their values, to names; parameters of all calls share them.
    """
    shared, parts = {name: schema[name] for name in ("$defs", "definitions") if name in schema}, list[str]()
    properties, required = schema.get("properties") or {}, schema.get("required")
    if not isinstance(properties, dict) or any(re.search(r"[<>\n]", name) for name in properties):
        raise ValueError("tools: properties: give an object whose names have no <, > and line end")
    first, _, last = template.partition("VALUE")
    after = _spelled(target, last)
    for name, given in properties.items():
        kind = referred(given, schema)
        before, types, rule = _spelled(target, first.replace("KEY", name)), argument_types(kind, schema), ""
        texts = kind.get("enum") if types == ["string"] else None
        if isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts):
            rule = " | ".join(map(json.dumps, texts))
        elif types and "string" not in types:
            rule = json_rule(shared | {field: kind[field] for field in kind if field != "description"})
        if rule:
            part = f"{before} {values.setdefault(rule, f'value_{len(values)}')} {after}"
        else:
            part = f"{before} text"
        parts.append(part if isinstance(required, list) and name in required else f"({part})?")
    return " ".join(parts)


def _text_until(target: Target, name: str, end: str) -> str:
    """The rule of this name: any text, and `end`. It must not end earlier."""
    spelled = _spelled(target, end)
    if spelled.startswith("<"):  # no text contains a special token
        return f"{name}: ANY {spelled}"
    return f"{name}[lazy]: {regex_rule('(?s:.*)' + re.escape(end))}"


def _spelled(target: Target, text: str) -> str:
    """A fixed text in a grammar, where special tokens stand for themselves."""
    names = {name: token for name, token in textless_tokens(target).items() if name in text}
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{names[piece]}]>" if piece in names else json.dumps(piece) for piece in pieces if piece)
