"""The drop-in for transformers' generate: its types and shapes, its greedy tokens, and what is refused."""

import copy
import gc
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LogitsProcessorList,
    Qwen2Config,
)

from longdraft.infer import transformers_api as api
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.transformers_api import forget, generate
from longdraft.models.hf import load_tokenizer, load_transformers

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0)
PROMPTS = [[5, 9, 27, 7, 11, 30, 2, 9], [33], [8, 8, 21, 14, 6]]


def tiny_model(config=LlamaConfig, seed=0, **values):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(**SHAPE | values)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return model


@pytest.fixture(scope="module", params=[LlamaConfig, Qwen2Config], ids=["llama", "qwen2"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2():
    return load_transformers("smollm2-135m", torch.float32)


def left_padded(prompts, pad=0):
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def equal(model, inputs, **kwargs):
    ours, theirs = generate(model, **inputs, **kwargs), model.generate(**inputs, **kwargs)
    assert ours.dtype == theirs.dtype == torch.int64 and ours.device == theirs.device
    assert ours.tolist() == theirs.tolist()
    return ours


CASES = {
    "max_new_tokens": {"max_new_tokens": 17},
    "max_length": {"max_length": 22},
    "default_length": {},
    "repetition_penalty": {"max_new_tokens": 17, "repetition_penalty": 1.7},
    "suppress_tokens": {"max_new_tokens": 17, "suppress_tokens": list(range(0, 90, 2))},
    "no_effect_when_greedy": {"max_new_tokens": 9, "temperature": 0.3, "top_k": 3, "top_p": 0.5},
    "min_new_tokens": {"max_new_tokens": 17, "min_new_tokens": 9, "eos_token_id": list(range(2, 97, 2))},
    "off": {"max_new_tokens": 9, "num_beams": 1, "output_scores": False, "use_cache": True},
}


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["B1", "B3"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_transformers(model, case, prompts):
    equal(model, left_padded(prompts), **CASES[case])


def test_an_end_token_ends_a_row_which_is_filled(model):
    inputs = left_padded(PROMPTS)
    free = equal(model, inputs, max_new_tokens=12)[:, 8:]
    end = int(free[1, 4])
    filled = equal(model, inputs, max_new_tokens=12, eos_token_id=end)
    assert 0 in filled[:, 8:] or filled.shape[1] < 20
    for kwargs in (
        {"eos_token_id": [int(free[0, 3]), end, int(free[2, 1])]},
        {"eos_token_id": end, "pad_token_id": 55},
        {"eos_token_id": end, "suppress_tokens": [end]},
        {"eos_token_id": -1},
    ):
        equal(model, inputs, max_new_tokens=12, **kwargs)
    every = [int(token) for token in free[:, 2]]
    assert equal(model, inputs, max_new_tokens=12, eos_token_id=every).shape[1] < 20


def test_pad_falls_back_to_the_first_end_token():
    model = tiny_model(pad_token_id=None)
    inputs = left_padded(PROMPTS)
    end = int(model.generate(**inputs, max_new_tokens=6)[1, 8 + 2])
    ours = equal(model, inputs, max_new_tokens=6, eos_token_id=[end, 96])
    assert int(ours[1, -1]) == end


def test_the_configuration_object_and_the_models_own(model):
    inputs = left_padded(PROMPTS)
    end = int(model.generate(**inputs, max_new_tokens=6)[2, 8 + 3])
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.4, eos_token_id=end, pad_token_id=3)
    equal(model, inputs, generation_config=config)
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig(max_length=19, eos_token_id=end, pad_token_id=4, temperature=0.6)
        equal(model, inputs)
        equal(model, inputs, eos_token_id=None)
        equal(model, inputs, generation_config=GenerationConfig(max_new_tokens=4))
    finally:
        model.generation_config = before
    assert config.max_new_tokens == 7 and config.top_k is None, "the caller's object is not changed"


def test_compiled_models_and_inference_mode():
    model, inputs = tiny_model(), left_padded(PROMPTS)
    with torch.inference_mode():
        inside = copy.deepcopy(model)
        assert inside.lm_head.weight.is_inference()
        equal(inside, inputs, max_new_tokens=9)
        compiled = generate(torch.compile(model), **inputs, max_new_tokens=5)
    assert compiled.tolist() == generate(model, **inputs, max_new_tokens=5).tolist()
    equal(model, inputs, max_new_tokens=30)


def test_prompts_without_a_mask(model):
    ids = left_padded(PROMPTS)["input_ids"]
    equal(model, {"input_ids": ids}, max_new_tokens=6)  # 0 is padding and no end token: it is masked
    equal(model, {"input_ids": ids[:1].to(torch.int32)}, max_new_tokens=6)
    # Where it is the end token too, transformers cannot tell and masks nothing.
    equal(model, {"input_ids": ids}, max_new_tokens=6, eos_token_id=0)


def test_sampling_is_seeded_and_independent(llama):
    inputs = left_padded(PROMPTS)
    asked = {"do_sample": True, "max_new_tokens": 10, "num_return_sequences": 4, "temperature": 1.3, "top_k": 0}
    torch.manual_seed(3)
    first, second = generate(llama, **inputs, **asked), generate(llama, **inputs, **asked)
    torch.manual_seed(3)
    assert torch.equal(generate(llama, **inputs, **asked), first) and not torch.equal(first, second)
    assert first.shape == (12, 18) and torch.equal(first[:, :8], inputs["input_ids"].repeat_interleave(4, 0))
    assert len({tuple(row) for row in first[:, 8:].tolist()}) == 12
    # The seed is the engine's: row 0 has it, row 1 the next.
    params = SamplingParams(temperature=1.3, seed=41, max_new_tokens=10, ignore_eos=True)
    engine = Engine(api._KEPT[llama].target).generate([PROMPTS[0]] * 2, [params, replace(params, seed=42)])
    ours = generate(llama, torch.tensor(PROMPTS[:1]), **asked | {"num_return_sequences": 2}, seed=41)
    assert ours[:, 8:].tolist() == [generation.tokens for generation in engine]


def test_filters_reach_the_engine(llama):
    """Each filter, set to leave one token, gives the greedy one; transformers' default top_k of 50 is kept."""
    inputs = left_padded(PROMPTS)
    greedy = llama.generate(**inputs, max_new_tokens=8)
    for one in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999}, {"temperature": 1e-4}):
        asked = {"top_k": None} | one
        assert torch.equal(generate(llama, **inputs, max_new_tokens=8, do_sample=True, seed=5, **asked), greedy)
    wide = {"max_new_tokens": 8, "do_sample": True, "temperature": 50.0, "seed": 5}
    assert torch.equal(generate(llama, **inputs, **wide), generate(llama, **inputs, **wide, top_k=50))
    assert not torch.equal(generate(llama, **inputs, **wide), generate(llama, **inputs, **wide, top_k=0))
    warm = wide | {"temperature": 3.0, "top_k": 0}
    assert not torch.equal(generate(llama, **inputs, **warm, eta_cutoff=0.5), generate(llama, **inputs, **warm))


REFUSED = {
    "logits_processor": [lambda ids, scores: scores],
    "custom_generate": "some/repository",
    "streamer": object(),
    "inputs_embeds": torch.zeros(1, 3, 32),
    "max_new_token": 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_by_name(llama, name):
    with pytest.raises(ValueError, match=rf"^{name}:.*model\.generate"):
        generate(llama, torch.tensor(PROMPTS[:1]), **{"max_new_tokens": 3, name: REFUSED[name]})


def test_every_field_is_done_or_refused():
    """A field that a later transformers adds is refused as soon as it has a value, not ignored."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    api._supported(GenerationConfig._get_default_generation_params() | {"logits_processor": LogitsProcessorList()})
    assert fields > {*api.Supported.model_fields}
    for name in fields - {*api.Supported.model_fields, "transformers_version"}:
        with pytest.raises(ValueError, match=f"^{name}: "):
            api._supported({name: "something"})


WRONG = [
    ("max_length", {"max_length": 8}),
    ("max_new_tokens", {"max_new_tokens": 57}),
    ("do_sample", {"do_sample": "yes"}),
    ("typical_p", {"do_sample": True, "typical_p": 0.5}),
    ("seed", {"do_sample": True, "seed": "one"}),
    ("banned", {"suppress_tokens": list(range(97))}),
    ("eos_token_id", {"eos_token_id": "x"}),
    ("tokenizer", {"stop_strings": ["a"]}),
    ("eagle", {"drafter": "eagle"}),
    ("attention_mask", {"attention_mask": torch.ones(1, 7)}),
    ("attention_mask", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])}),
    ("attention_mask", {"attention_mask": torch.zeros(1, 8)}),
    ("attention_mask", {"pad_token_id": 30}),
    ("input_ids", {"input_ids": torch.rand(1, 4)}),
    ("input_ids", {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}),
    ("must lie in 0", {"input_ids": torch.tensor([[4, 97]])}),
    ("input_ids", {"input_ids": None}),
]


@pytest.mark.parametrize(("field", "kwargs"), WRONG)
def test_errors_name_the_field(llama, field, kwargs):
    with pytest.raises(ValueError, match=field):
        generate(llama, **{"input_ids": torch.tensor(PROMPTS[:1])} | kwargs)


def test_a_pushed_custom_generate_runs(smollm2, tokenizer):
    """A file as the version before wrote it into a draft's repository, which transformers loads from there."""
    path = Path(__file__).with_name("custom_generate_written_before.py.txt")
    written: dict = {}
    exec(compile(path.read_text(), path, "exec"), written)
    ids = torch.tensor([[504, 3575, 282]])
    asked = {"max_new_tokens": 9, "do_sample": False}
    assert (
        written["generate"](smollm2, ids, tokenizer=tokenizer, **asked).tolist()
        == smollm2.generate(ids, **asked).tolist()
    )
    assert type(api._KEPT[smollm2]._engine.drafter).__name__ == "TokenSwiftDrafter"


def test_other_architectures_and_draft_folders_without_a_tokenizer(llama, tmp_path):
    other = AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=97))
    with pytest.raises(ValueError, match="gpt2"):
        generate(other, torch.tensor(PROMPTS[:1]), max_new_tokens=3)
    with pytest.raises(ValueError, match="tokenizer"):
        generate(llama, torch.tensor(PROMPTS[:1]), max_new_tokens=3, drafter="tokenswift", draft=tmp_path)


def test_the_conversion_is_kept_and_sees_new_weights():
    model = tiny_model(seed=4)
    inputs = left_padded(PROMPTS)
    before = equal(model, inputs, max_new_tokens=8)
    target, engine = api._KEPT[model].target, api._KEPT[model]._engine
    equal(model, inputs, max_new_tokens=9)
    assert api._KEPT[model].target is target and api._KEPT[model]._engine is engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(inputs["input_ids"], labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    assert not torch.equal(equal(model, inputs, max_new_tokens=8), before)
    for parameter in model.parameters():
        parameter.data.mul_(0.8)  # no version counter sees this
    equal(model, inputs, max_new_tokens=8)
    assert api._KEPT[model].target is target
    model.double()
    equal(model, inputs, max_new_tokens=8)
    assert api._KEPT[model].target is not target
    model.resize_token_embeddings(99, mean_resizing=False)
    equal(model, inputs, max_new_tokens=8)
    forget(model)
    forget(model)
    assert model not in api._KEPT
    equal(model, inputs, max_new_tokens=3)
    count = len(api._KEPT)
    del model, optimizer
    gc.collect()
    assert len(api._KEPT) == count - 1


def test_calls_of_several_threads(llama):
    """Each has its own engine."""
    theirs, ours = llama.generate(**left_padded(PROMPTS), max_new_tokens=20).tolist(), {}

    def call(i):
        ours[i] = generate(llama, **left_padded(PROMPTS), max_new_tokens=20).tolist()

    threads = [threading.Thread(target=call, args=[i]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ours[i] for i in range(3)] == [theirs] * 3


def test_real_text_with_stop_strings(smollm2, tokenizer):
    """SmolLM2 in fp32, with a ragged batch, an end token and stop strings, of which one is a special token."""
    texts = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):\n    if n <= 1:\n        return n\n"]
    tokenizer.padding_side = "left"
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    stops = {"stop_strings": [".\n\nTh", " 6", "<|im_end|>"], "tokenizer": tokenizer}
    rows = equal(smollm2, inputs, max_new_tokens=14, **stops)[:, inputs["input_ids"].shape[1] :]
    assert rows[0].tolist().count(tokenizer.pad_token_id) == 9 and tokenizer.pad_token_id not in rows[2]
    assert tokenizer.decode(rows[0], skip_special_tokens=True) == " Paris.\n\nThe"
    chat = [{"role": "user", "content": "Say only: yes"}]
    one = dict(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True))
    answer = equal(smollm2, one, max_new_tokens=8, eos_token_id=None, **stops)
    assert tokenizer.decode(answer[0, one["input_ids"].shape[1] :]) == "Yes.<|im_end|>"
