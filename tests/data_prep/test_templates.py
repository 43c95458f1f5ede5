"""The chat templates of configs/chat_templates, held against reference files written by hand from the documented forms.

A file of templates/ holds conversations: `=== name`, then each message under `--- role`, then under `--- rendered` what
the template makes of it, once for each sequence. Text stands between bars, so that blanks at its ends are seen; a new
line begins where a line ends. In rendered text 《 》 enclose what the loss counts, and « » a control token's spelling
that came with a message and stays plain text. The marks are no part of the text.
"""

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import ROLES, Conversation
from longdraft.data_prep.tokenize import Encoded

TEMPLATES = Path(__file__).resolve().parents[2] / "configs" / "chat_templates"
REFERENCES = Path(__file__).with_name("templates")
BAR = "│"

LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Messages = list[tuple[str, str]]
TOOLS = ["<tool_call>", "</tool_call>"]
THINK = ["<think>", "</think>"]
# DeepSeek's marks are written with U+FF5C.
DEEPSEEK_BOS, DEEPSEEK_EOS = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
DEEPSEEK_ROLES = ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"]  # which are no control tokens there
# How Llama 3 and Qwen split a text before BPE: a run of line ends is never split, whatever follows it.
LINE_ENDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """special: control tokens. plain: tokens that the family's tokenizer adds without calling them special. splits: its
    regular expression, None for SmolLM2's own. opens: whether the prompt opens a thought, so that answers need one."""

    bos: str | None
    eos: str
    special: list[str]
    plain: list[str] = field(default_factory=list)
    splits: str | None = None
    opens: bool = False


FAMILIES = {
    "llama-3": Family("<|begin_of_text|>", "<|eot_id|>", LLAMA, splits=LINE_ENDS),
    "llama-3.1": Family("<|begin_of_text|>", "<|eot_id|>", [*LLAMA, "<|eom_id|>", "<|python_tag|>"], splits=LINE_ENDS),
    "qwen2.5": Family(None, "<|im_end|>", CHATML, TOOLS, LINE_ENDS),
    "qwen3": Family(None, "<|im_end|>", CHATML, [*TOOLS, "<tool_response>", "</tool_response>", *THINK], LINE_ENDS),
    "qwq": Family(None, "<|im_end|>", CHATML, [*TOOLS, *THINK], LINE_ENDS, opens=True),
    "deepseek-r1": Family(
        DEEPSEEK_BOS, DEEPSEEK_EOS, [DEEPSEEK_BOS, DEEPSEEK_EOS], [*DEEPSEEK_ROLES, *THINK], LINE_ENDS, opens=True
    ),
    "vicuna": Family("<s>", "</s>", ["<unk>", "<s>", "</s>"]),
    "smollm2": Family("<|im_start|>", "<|im_end|>", CHATML),
}


@dataclass(frozen=True)
class Case:
    name: str
    sections: list[tuple[str, list[str]]]

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(role, "\n".join(lines)) for role, lines in self.sections if role != "rendered"]

    @property
    def rendered(self) -> list[str]:
        return ["\n".join(lines) for role, lines in self.sections if role == "rendered"]


def read_cases(family: str) -> list[Case]:
    cases = []
    for line in (REFERENCES / f"{family}.txt").read_text(encoding="utf-8").split("\n"):
        if line.startswith("=== "):
            cases.append(Case(line[4:], []))
        elif line.startswith("--- "):
            cases[-1].sections.append((line[4:], []))
        elif line.startswith(BAR):
            assert len(line) > 1 and line.endswith(BAR), line
            cases[-1].sections[-1][1].append(line[1:-1])
        else:
            assert not line or line.startswith("# "), line
    return cases


@dataclass(frozen=True)
class Loaded:
    """A family's tokenizer, which is SmolLM2's with the family's tokens, and the encoder with the family's template."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    encoder: ChatEncoder
    cases: list[Case]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, smollm2) -> Loaded:
    """Run all tests of a family one after another."""
    name, family = request.param, FAMILIES[request.param]
    rust = Tokenizer.from_str(smollm2.backend_tokenizer.to_str())
    rust.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in family.special])
    rust.add_tokens([AddedToken(token, normalized=False) for token in family.plain])
    if family.splits is not None:
        split = Split(Regex(family.splits), behavior="isolated")
        rust.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    roles = {"eos_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, **roles)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return Loaded(name, tokenizer, ChatEncoder(tokenizer), read_cases(name))


def encode(family: Loaded, messages: Messages) -> list[Encoded]:
    return family.encoder.encode_document(
        Conversation("c", b"", tuple({"role": role, "content": content} for role, content in messages))
    )


def decode(family: Loaded, tokens) -> str:
    text = family.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def marked(family: Loaded, tokens, spans) -> str:
    """The text of all tokens, each run of `spans` between marks."""
    text, at = "", 0
    for start, stop in spans:
        text += f"{decode(family, tokens[at:start])}《{decode(family, tokens[start:stop])}》"
        at = stop
    return text + decode(family, tokens[at:])


def unmarked(rendered: str, marks: str = "《》«»") -> str:
    return rendered.translate({ord(mark): None for mark in marks})


def theirs(tokenizer: PreTrainedTokenizerFast, messages: Messages, **kwargs) -> Any:
    """The rendering of transformers itself, as tokens, or as text with tokenize=False."""
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(chat, return_dict=False, **kwargs)


def sequence_text(family: Loaded, messages: Messages) -> str:
    """The rendering of transformers, but with the last answer's thought if the prompt opens it: DeepSeek-R1's template
    drops that."""
    if not FAMILIES[family.name].opens:
        return theirs(family.tokenizer, messages, tokenize=False)
    prompt = theirs(family.tokenizer, messages[:-1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<think>\n") and messages[-1][1].startswith("<think>\n")
    line_end = "\n" if family.name == "qwq" else ""
    return prompt + messages[-1][1].removeprefix("<think>\n") + FAMILIES[family.name].eos + line_end


def shown_by(one: Encoded, messages: Messages) -> tuple[Messages, list[int]]:
    """The messages that a sequence shows, all or those up to its turn; and which of them its spans are."""
    answers = [i for i, (role, _) in enumerate(messages) if role == "assistant"]
    if "#" in one.name:
        messages = messages[: answers[int(one.name.split("#")[1]) - 1] + 1]
        answers = [len(messages) - 1]
    return messages, answers


def test_every_template_has_a_reference_and_a_family():
    assert {path.stem for path in TEMPLATES.iterdir()} == {path.stem for path in REFERENCES.iterdir()} == {*FAMILIES}
    for name in FAMILIES:
        cases = read_cases(name)
        assert len({case.name for case in cases}) == len(cases) >= 5
        assert all("《" in rendered for case in cases for rendered in case.rendered)


def test_tokens_and_spans_are_the_references(family):
    special = FAMILIES[family.name].special
    ids, spelled = family.tokenizer.convert_tokens_to_ids(special), "|".join(map(re.escape, special))
    for case in family.cases:
        found = encode(family, case.messages)
        expected = [unmarked(rendered, "«»") for rendered in case.rendered]
        assert [marked(family, one.tokens, one.spans) for one in found] == expected, case.name
        assert {one.tokens.dtype.name for one in found} == {"int32"}
        # All control tokens are the template's, in order, and none comes from a message.
        for one, rendered in zip(found, case.rendered, strict=True):
            written = re.findall(spelled, unmarked(re.sub("«.*?»", "", rendered)))
            control = [token for token in one.tokens.tolist() if token in ids]
            assert control == family.tokenizer.convert_tokens_to_ids(written), case.name
            assert all(one.tokens[stop - 1] == family.tokenizer.eos_token_id for _, stop in one.spans), case.name


# An answer that begins with a line end, which would form one token with the header's: decoding never sees that token.
MELTS = {(name, "blanks at the ends, and characters of several bytes") for name in ("qwen2.5", "smollm2")}
MELTS |= {(name, "an empty thought, and a thought that names its end#1") for name in ("qwq", "deepseek-r1")}


def test_transformers_gives_the_same_text_and_tokens(family):
    """Except for spelled-out control tokens, which transformers takes for real ones."""
    for case in family.cases:
        for one, rendered in zip(encode(family, case.messages), case.rendered, strict=True):
            messages, answers = shown_by(one, case.messages)
            whole = sequence_text(family, messages)
            assert whole == unmarked(rendered), case.name
            same = "«" not in rendered and (family.name, case.name + one.name.removeprefix("c")) not in MELTS
            expected = family.tokenizer(whole, add_special_tokens=False)["input_ids"]
            assert (one.tokens.tolist() == expected) == same, case.name
            # What is before each mark is the prompt that decoding gets.
            places = [found.start() for found in re.finditer("《", rendered)]
            for place, (start, _), i in zip(places, one.spans, answers, strict=True):
                render = partial(theirs, family.tokenizer, messages[:i], add_generation_prompt=True)
                assert unmarked(rendered[:place]) == render(tokenize=False), case.name
                assert "«" in rendered or one.tokens[:start].tolist() == render(), case.name


PARTS = ["ship", " ", "\n", "\n\n", "é", "🙂", "<think>", "</think>", "<|im_end|>", "<|eot_id|>", "</s>", "<s>", "  x"]
contents = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
turns = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)
at_most_one = st.lists(contents, max_size=1)


@settings(max_examples=60, deadline=None)
@given(at_most_one, turns, at_most_one)
def test_any_content_is_rendered_and_marked(family, opening, turns, closing):
    if FAMILIES[family.name].opens:
        turns = [(question, f"<think>\n{answer}</think>{answer}") for question, answer in turns]
    messages = [("system", content) for content in opening]
    messages += [message for asked, answer in turns for message in (("user", asked), ("assistant", answer))]
    messages += [("user", content) for content in closing]
    found, end = encode(family, messages), FAMILIES[family.name].eos
    special = family.tokenizer.convert_tokens_to_ids(FAMILIES[family.name].special)
    assert sum(len(one.spans) for one in found) == len(turns)
    for one in found:
        shown, answers = shown_by(one, messages)
        assert decode(family, one.tokens) == sequence_text(family, shown)
        plain = [(role, "<think>\nx</think>x" if FAMILIES[family.name].opens else "x") for role, _ in shown]
        n_special, n_plain = (np.isin(each.tokens, special).sum() for each in (one, encode(family, plain)[-1]))
        assert n_special == n_plain, "a message made a control token"
        for (start, stop), i in zip(one.spans, answers, strict=True):
            prompt = theirs(family.tokenizer, shown[:i], tokenize=False, add_generation_prompt=True)
            assert decode(family, one.tokens[:start]) == prompt
            turn = sequence_text(family, shown[: i + 1])
            assert prompt + decode(family, one.tokens[start:stop]) == turn[: turn.rindex(end) + len(end)]


@settings(max_examples=200, deadline=None)
@given(at_most_one, st.lists(st.tuples(st.sampled_from(ROLES), contents), min_size=1, max_size=6), st.booleans())
def test_ours_for_smollm2_is_the_one_its_tokenizer_carries(smollm2, opening, messages, prompt):
    messages = [*(("system", content) for content in opening), *messages]
    ours, render = (TEMPLATES / "smollm2.jinja").read_text(encoding="utf-8"), partial(theirs, smollm2, messages)
    assert ours != smollm2.chat_template
    arguments = {"tokenize": False, "add_generation_prompt": prompt}
    assert render(chat_template=ours, **arguments) == render(**arguments)
