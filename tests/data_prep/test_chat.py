"""Which tokens of a conversation the loss counts: decoded and compared with the answers, for many templates."""

from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longdraft.data_prep import chat
from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.chat_template import ChatTokenizer
from longdraft.data_prep.documents import Conversation, Unusable

CHATML_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = f"{{% for m in messages %}}{CHATML_TURN}{{% endfor %}}{CHATML_PROMPT}"
MARKED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
HELLO = [("user", "What is a ship?"), ("assistant", "A boat, but large.")]
TWO_TURNS = [*HELLO, ("user", "And a boat?"), ("assistant", "A ship, but small. 🙂")]


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer():
    """What templates do not change is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "ChatTokenizer", cache(ChatTokenizer))
        yield


@cache
def encoder_of(tokenizer, template=None):
    return ChatEncoder(tokenizer, template)


def conversation(messages, unfinished=False, tools=()):
    messages = [one if isinstance(one, dict) else {"role": one[0], "content": one[1]} for one in messages]
    return Conversation("c", b"", tuple(messages), unfinished, tools)


def answers(tokenizer, messages, template=None):
    """The decoded text of each span that the loss counts, for each sequence: {name: [texts]}."""
    encoded = encoder_of(tokenizer, template).encode_document(conversation(messages))
    return {one.name: [text(tokenizer, one.tokens[start:stop]) for start, stop in one.spans] for one in encoded}


def text(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encode(tokenizer, messages, template=None):
    (encoded,) = encoder_of(tokenizer, template).encode_document(conversation(messages))
    return encoded


def reference(tokenizer, messages, template=None, **kwargs):
    """The tokens that transformers itself makes."""
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(chat, chat_template=template, return_dict=False, **kwargs)


def test_a_template_with_marks_is_read_as_without(smollm2):
    assert encode(smollm2, TWO_TURNS, MARKED).tokens.tolist() == reference(smollm2, TWO_TURNS, MARKED)
    assert answers(smollm2, TWO_TURNS, MARKED) == answers(smollm2, TWO_TURNS, CHATML)


def test_other_ends_of_a_turn(smollm2):
    # Without a special token, the first token after the answer ends it.
    plain = (
        "{% for m in messages %}{{ m.role | capitalize + ': ' + m.content | trim + '\n###\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    assert answers(smollm2, TWO_TURNS, plain) == {"c": [" A boat, but large.\n", " A ship, but small. 🙂\n"]}
    # If the template writes nothing after an answer, EOS ends it, like any other document.
    nothing = plain.replace(" + '\n###\n'", "")
    assert answers(smollm2, HELLO, nothing) == {"c": [" A boat, but large.<|im_end|>"]}
    # Text after the end of the last turn (as in Phi-3's template) is not learned, and all turns end in the same way.
    more = CHATML.replace("{% if add_gen", "{% if not add_generation_prompt %}<|endoftext|>{% endif %}{% if add_gen")
    ends = {"c": ["A boat, but large.<|im_end|>", "A ship, but small. 🙂<|im_end|>"]}
    assert answers(smollm2, TWO_TURNS, more) == ends
    assert text(smollm2, encode(smollm2, TWO_TURNS, more).tokens).endswith("<|im_end|>\n<|endoftext|>")
    # A header that the model writes itself: special tokens before the answer.
    channel = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}<jupyter_text>{% endif %}"
        "{{ '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    assert answers(smollm2, HELLO, channel) == {"c": ["<jupyter_text>\nA boat, but large.<|im_end|>"]}


# Expressions that raise TypeError, ZeroDivisionError, ValueError and KeyError.
WRONG = ["tools | length", "messages[0] + 1", "1 / 0", "'a'.index('b')", "'%(x)s' % {}"]


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (ALTERNATES + CHATML, [*HELLO, ("assistant", "more")], "refused_by_template"),
        ("{{ messages[0].no.such.thing }}", HELLO, "refused_by_template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", HELLO, "refused_by_template"),
        ("{{ ''.__class__.__mro__ }}" + CHATML, HELLO, "refused_by_template"),
        *((f"{{{{ {wrong} }}}}" + CHATML, HELLO, "refused_by_template") for wrong in WRONG),
        (CHATML.replace("assistant\n'", "assistant\nWell, '"), HELLO, "prompt_not_kept"),
        (CHATML.replace("m['content']", "m['role']"), HELLO, "answer_not_found"),
        (CHATML.replace("m['content']", "m['content'] + m['content']"), HELLO, "answer_not_found"),
        (CHATML.replace("m['content']", "(m['content'] | length | string) + m['content']"), HELLO, "answer_not_found"),
    ],
    ids=["two assistants", "undefined", "endless", "sandbox", *WRONG, "opens the answer", "omitted", "twice", "length"],
)  # fmt: skip
def test_what_has_no_sure_mask_has_none_and_says_why(smollm2, template, messages, why):
    with pytest.raises(Unusable) as error:
        answers(smollm2, messages, template)
    assert error.value.why == why


OPENS = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
KEPT, DROPPED, SHOWN = "m['content']", "m['content'].split('</think>')[-1]", "m['content'] if loop.last else "
ROLE = "'<|im_start|>' + m['role'] + '\n' + "
THINKING = {  # what published templates do with an answer's thought where the prompt opens it
    "kept": OPENS,
    "dropped from history (QwQ)": OPENS.replace(KEPT, f"({SHOWN}{DROPPED}.lstrip('\n'))"),
    "dropped everywhere (QwQ at first)": OPENS.replace(KEPT, f"{DROPPED}.lstrip('\n')"),
    "dropped, blanks kept (R1)": OPENS.replace(KEPT, DROPPED),
    "written anew (Qwen3-Thinking)": OPENS.replace(
        ROLE + KEPT,
        f"{ROLE}('<think>\n' + ({KEPT}.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in {KEPT} "
        f"else '') + '\n</think>\n\n' if loop.last and m['role'] == 'assistant' else '') + {DROPPED}.lstrip('\n')",
    ),
}
ANEW = THINKING["written anew (Qwen3-Thinking)"]


@pytest.mark.parametrize("template", THINKING.values(), ids=THINKING)
@pytest.mark.parametrize("opening", ["<think>\n", "<think>", "", "\n<think>"], ids=repr)
def test_a_prompt_that_opens_a_thought_is_followed_by_thought_and_answer(smollm2, template, opening):
    """However the content begins, and whatever the template keeps. An earlier answer stands as the template has it."""
    thought = "a thought\n</think>\n\n1"
    second = "b\n</think>\n\n2" if template == ANEW else "b</think>2"
    said = opening + thought, opening + "b</think>2"
    messages = [("user", "one"), ("assistant", said[0]), ("user", "two"), ("assistant", said[1])]
    encoded = encoder_of(smollm2, template).encode_document(conversation(messages))
    places = [1, 3] if len(encoded) > 1 else [3]
    for one, i in zip(encoded, places, strict=True):
        *_, (start, _) = one.spans
        assert one.tokens[:start].tolist() == reference(smollm2, messages[:i], template, add_generation_prompt=True)
    found = answers(smollm2, messages, template)
    assert [text for texts in found.values() for text in texts] == [f"{thought}<|im_end|>", f"{second}<|im_end|>"]
    assert list(found) == (["c"] if template == OPENS and opening == "<think>\n" else ["c#1", "c#2"])


@pytest.mark.parametrize("template", THINKING.values(), ids=THINKING)
@pytest.mark.parametrize(
    ("content", "unfinished", "learned", "anew"),
    [
        ("<think>why</think>because", False, "why</think>because", "why\n</think>\n\nbecause"),
        ("<think>\nwhy\n</think>\n\nbecause", False, "why\n</think>\n\nbecause", "why\n</think>\n\nbecause"),
        ("why</think>", False, "why</think>", "why\n</think>\n\n"),
        ("<think>\n</think>\nbecause \n", False, "</think>\nbecause \n", "\n</think>\n\nbecause \n"),
        ("a</think>b</think>c", False, "a</think>b</think>c", "a\n</think>\n\nc"),
        ("<think>\nwhy</think><think>\nc", False, "why</think><think>\nc", "why\n</think>\n\n<think>\nc"),
        ("<think>\nwhy</think>\nbegun ", True, "why</think>\nbegun", "why</think>\nbegun"),
        ("<think>\nwithin", True, "within", "within"),
    ],
)
def test_a_template_that_writes_thoughts_anew_decides_what_is_learned(
    smollm2, template, content, unfinished, learned, anew
):
    """What it writes after the prompt counts; the content itself counts where a template writes no thought there. An
    unfinished answer follows the prompt as it is, and has no end."""
    messages = (("user", "why?"), ("assistant", content))
    (one,) = encoder_of(smollm2, template).encode_document(conversation(messages, unfinished))
    ((start, stop),) = one.spans
    end = "" if unfinished else "<|im_end|>"
    assert text(smollm2, one.tokens[start:stop]) == (anew if template == ANEW else learned) + end
    if unfinished:
        assert stop == len(one.tokens)
    elif template == ANEW:
        assert one.tokens.tolist() == reference(smollm2, messages, template)


def test_an_answer_without_the_thought_that_the_prompt_opens(smollm2):
    """It is refused with the remedy, unless the template itself writes an empty thought."""
    for template in THINKING.values():
        if template == ANEW:
            said = {"c": ["\n</think>\n\nA boat, but large.<|im_end|>"]}
            assert answers(smollm2, HELLO, template) == said
            continue
        for messages in (HELLO, [("system", "s"), *HELLO]):
            with pytest.raises(Unusable) as error:
                answers(smollm2, messages, template)
            assert error.value.why == "prompt_not_kept" and "regenerate" in error.value.detail


# Mistral v0.3 as published: the system message stands in the last message, if that is a question.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content | trim + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% endfor %}"
)


def test_a_system_message_that_stands_in_the_last_question(smollm2):
    """Each answer follows the prompt that decoding gets, which has the system message in another place."""
    messages = [("system", "Answer briefly."), *TWO_TURNS]
    found = encoder_of(smollm2, MISTRAL).encode_document(conversation(messages))
    first, second = "What is a ship?[/INST]", "And a boat?[/INST] A ship, but small. 🙂<|im_end|>"
    assert [text(smollm2, one.tokens) for one in found] == [
        f"<|im_start|>[INST] Answer briefly.\n\n{first} A boat, but large.<|im_end|>",
        f"<|im_start|>[INST] {first} A boat, but large.<|im_end|>[INST] Answer briefly.\n\n{second}",
    ]
    said = {"c#1": [" A boat, but large.<|im_end|>"], "c#2": [" A ship, but small. 🙂<|im_end|>"]}
    assert answers(smollm2, messages, MISTRAL) == said
    for one, i in zip(found, (2, 4), strict=True):
        prompt = reference(smollm2, messages[:i], MISTRAL, add_generation_prompt=True)
        assert one.tokens[: one.spans[0][0]].tolist() == prompt
    assert list(answers(smollm2, TWO_TURNS, MISTRAL)) == ["c"]  # without a system message nothing moves


def test_a_greeting_is_context_that_is_not_learned(smollm2):
    """It has no prompt, and official templates refuse a prompt without messages."""
    official = "{{ '' if messages[0]['role'] else '' }}" + CHATML
    greeted = [("assistant", "Welcome."), *HELLO]
    assert answers(smollm2, greeted, official) == {"c": ["A boat, but large.<|im_end|>"]}
    assert "Welcome." in text(smollm2, encode(smollm2, greeted, official).tokens)
    with pytest.raises(Unusable, match="no_assistant_turn"):
        answers(smollm2, greeted[:2], official)


def test_no_clock_and_no_template(smollm2, tiny_tokenizer):
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert text(smollm2, encode(smollm2, HELLO, dated).tokens).startswith("26 Jul 2024<|im_start|>user")
    with pytest.raises(ValueError, match="chat_template"):
        ChatEncoder(tiny_tokenizer)
    with pytest.raises(ValueError, match=r"chat template cannot be read.*Unexpected end of template"):
        ChatEncoder(smollm2, "{% for m in messages %}")
    assert answers(tiny_tokenizer, HELLO, CHATML.replace("<|im_end|>", "<|end|>")) == {
        "c": ["A boat, but large.<|end|>"]
    }


WORDS = ["▁A", "▁boat", "▁ship", "</", "s>"]


@pytest.mark.parametrize("kind", ["first", "never", "always"])
def test_tokenizers_that_begin_words_with_a_blank(sentencepiece, kind):
    tokenizer = sentencepiece(kind, WORDS, strips=False)
    messages = [("user", "What is a ship?"), ("assistant", "A boat."), ("user", "And a boat?"), ("assistant", "small")]
    encoded = encode(tokenizer, messages, LLAMA2)
    assert encoded.tokens.tolist() == reference(tokenizer, messages, LLAMA2)
    assert answers(tokenizer, messages, LLAMA2) == {"c": [" A boat. </s>", " small </s>"]}
    spelled = encode(tokenizer, [("user", "a </s> b"), ("assistant", "<s>")], LLAMA2)
    assert [(spelled.tokens == token).sum() for token in (1, 2)] == [1, 1]


def odd_tokenizer() -> PreTrainedTokenizerFast:
    """Special tokens that absorb blanks, inside and outside the model's vocabulary, with added tokens between them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|im_start|>", "<x>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a ship and a boat"] * 4, trainer)
    tokenizer.add_tokens(["<think>"])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", rstrip=True, lstrip=True, normalized=False)])
    tokenizer.add_tokens(["</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def test_odd_added_tokens_keep_their_ids():
    tokenizer = odd_tokenizer()
    messages = [("user", "<think> is text?"), ("assistant", "<think>a boat</think> a ship \n")]
    encoded = encode(tokenizer, messages, CHATML)
    assert encoded.tokens.tolist() == reference(tokenizer, messages, CHATML)
    # Tokens that are added but not special are written by the model, as one token each.
    counts = [(encoded.tokens == tokenizer.convert_tokens_to_ids(token)).sum() for token in ("<think>", "</think>")]
    assert counts == [2, 1]
    assert answers(tokenizer, messages, CHATML) == {"c": ["<think>a boat</think> a ship<|im_end|>"]}  # blanks taken
