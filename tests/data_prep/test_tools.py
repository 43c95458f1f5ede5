"""Reasoning and tool calls, with the templates of Qwen3 and gpt-oss as published (Apache-2.0), against transformers."""

import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import Conversation, Unusable, read_messages

PUBLISHED = Path(__file__).with_name("published")
# Templates in the manner of others: one whose prompt opens a thought and which expects it in the content (QwQ's), one
# that knows neither thoughts nor tools, one that drops thoughts (DeepSeek-V3.1's), one that writes the first of a
# message's calls alone, and one that writes its name twice.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWQ = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n'))").replace(
    "assistant\n'", "assistant\n<think>\n'"
)
DROPS = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
ONE_CALL = CHATML.replace("m.content", "(m.tool_calls[0].function.name if m.tool_calls else m.content)")
NAME_TWICE = CHATML.replace("m.content", "(m.tool_calls[0].function.name * 2 if m.tool_calls else m.content)")
SPELLED = "Adds <|im_end|> and <|end|>."
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": SPELLED,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, SPELLED: {"type": "integer"}}},
    },
}
ASK, AGAIN, FIVE = ({"role": role, "content": text} for role, text in (("user", "2+3?"), ("user", "4?"), ("tool", "5")))


def answer(content="", reasoning=None, *arguments):
    calls = [{"type": "function", "function": {"name": "add", "arguments": one}} for one in arguments]
    fields = {"reasoning_content": reasoning, "tool_calls": calls}
    return {"role": "assistant", "content": content} | {field: value for field, value in fields.items() if value}


def encoder_of(smollm2, template):
    """SmolLM2's tokenizer with the template and its control tokens."""
    path = PUBLISHED / f"{template}.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else template
    rust = Tokenizer.from_str(smollm2.backend_tokenizer.to_str())
    rust.add_special_tokens([AddedToken(t, normalized=False) for t in sorted({*re.findall(r"<\|[a-z_]+\|>", source)})])
    rust.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>")
    tokenizer.chat_template = source.replace('strftime_now("%Y-%m-%d")', "'2024-07-26'")
    return ChatEncoder(tokenizer), tokenizer


def transformers_text(tokenizer, messages, **options):
    named = [m | ({"thinking": m["reasoning_content"]} if "reasoning_content" in m else {}) for m in messages]
    return tokenizer.apply_chat_template(named, tools=[TOOL], tokenize=False, **options)


THINK = "<think>\n{}\n</think>\n\n"
CALL, END = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}}}}}\n</tool_call>', "<|im_end|>"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant", "<|channel|>final<|message|>{}<|return|>"
TO_ADD = ' to=functions.add<|channel|>commentary json<|message|>{{"a": {}}}<|call|>'
STEPS = (
    ASK,
    answer("", "I add.", {"a": 2}),
    FIVE,
    answer("It is 5.", "It says so."),
    AGAIN,
    answer("", "So.", {"a": 4}),
)
TWICE = (ASK, answer("Hm.", None, {"a": 2}, {"a": 3}), FIVE)
LEARNED = {  # template, messages, and the answers that the loss counts, by sequence
    "Qwen3": ("qwen3", STEPS, [
        [THINK.format("I add.") + CALL.format(2) + END, THINK.format("It says so.") + "It is 5." + END],
        [THINK.format("So.") + CALL.format(4) + END],
    ]),
    "Qwen3, two calls": ("qwen3", TWICE, [[THINK.format("") + "Hm.\n" + CALL.format(2) + "\n" + CALL.format(3) + END]]),
    "gpt-oss": ("gpt-oss", STEPS, [
        [ANALYSIS.format("I add.") + TO_ADD.format(2), ANALYSIS.format("It says so.") + FINAL.format("It is 5.")],
        [ANALYSIS.format("So.") + TO_ADD.format(4)],
    ]),
    "gpt-oss, content as thought": ("gpt-oss", (ASK, answer("I add.", None, {"a": 2}), FIVE, answer("5.")), [
        [ANALYSIS.format("I add.") + TO_ADD.format(2), FINAL.format("5.")],
    ]),
    "a call that is written with its name twice": (NAME_TWICE, (ASK, answer("", None, {"a": 2}), FIVE, answer("5.")), [
        ["addadd" + END, "5." + END],
    ]),
    "an answer of weight 0": (CHATML, (ASK, answer("5.") | {"weight": 0}, AGAIN, answer("4.")), [["4." + END]]),
    "QwQ": (QWQ, (ASK, answer("5.", "I add."), AGAIN, answer("4.", "No.")), [
        ["I add.\n</think>\n\n5." + END], ["No.\n</think>\n\n4." + END],
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "learned"), LEARNED.values(), ids=LEARNED)
def test_reasoning_and_calls_are_learned_where_the_target_would_write_them(smollm2, template, messages, learned):
    encoder, tokenizer = encoder_of(smollm2, template)
    conversation = Conversation("c", b"", read_messages([*messages]), tools=(TOOL,))
    places = [i for i, one in enumerate(messages) if one["role"] == "assistant" and "weight" not in one]
    encoded = encoder.encode_document(conversation)
    assert [[tokenizer.decode(one.tokens[slice(*span)]) for span in one.spans] for one in encoded] == learned
    starts = [one.tokens[:start] for one in encoded for start, _ in one.spans]
    for tokens, place in zip(starts, places, strict=True):
        prompt = transformers_text(tokenizer, messages[:place], add_generation_prompt=True)
        assert tokenizer.decode(tokens) == prompt
        assert encoder.encode_prompt(messages[:place], (TOOL,)) == tokens.tolist()
        # A control token that is spelled out in the tool's description, or names a parameter, is text.
        as_text = tokenizer(prompt.replace(SPELLED, "")).input_ids
        special = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|end|>")]
        assert sum(tokens == one for one in special).sum() == sum(as_text.count(one) for one in special)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, (ASK, answer("5.", "I add."))),
        (DROPS, (ASK, answer("5.", "I add."))),
        (CHATML, (ASK, answer("", None, {"a": 2}), FIVE, answer("5."))),
        (ONE_CALL, TWICE),
        (ONE_CALL, (ASK, answer("Hm.", None, {"a": 2}), FIVE, answer("5."))),
        (NAME_TWICE, (ASK, answer("Hm.", None, {"a": 2}), FIVE, answer("5."))),
        ("gpt-oss", TWICE),
    ],
    ids=[
        "reasoning",
        "a thought",
        "calls",
        "a second call",
        "content beside a call",
        "a name twice",
        "gpt-oss, a second call",
    ],
)
def test_what_the_template_does_not_write_is_bad(smollm2, template, messages):
    encoder, _ = encoder_of(smollm2, template)
    for encode in (
        lambda: encoder.encode_document(Conversation("c", b"", read_messages([*messages]))),
        lambda: encoder.encode_prompt(messages),
    ):
        with pytest.raises(Unusable) as error:
            encode()
        assert error.value.why == "answer_beside_content"


def test_a_record_sets_variables_of_the_template(smollm2):
    encoder, tokenizer = encoder_of(smollm2, "qwen3")
    messages, options = (ASK, answer("5.")), {"enable_thinking": False}
    (encoded,) = encoder.encode_document(Conversation("c", b"", messages, options=options))
    prompt = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True, **options)
    ((start, stop),) = encoded.spans
    assert tokenizer.decode(encoded.tokens[:start]) == prompt and prompt.endswith("</think>\n\n")
    assert tokenizer.decode(encoded.tokens[start:stop]) == "5." + END
    assert encoder.encode_prompt([ASK], (), options) == encoded.tokens[:start].tolist()
