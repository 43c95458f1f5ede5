"""Quantised checkpoints of each form give the model of the numbers that they stand for.

They are packed here bit by bit, as the programs that write them document it. Where transformers reads them without a
GPU, it is compared too.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from longdraft.models.hf import load_target, read_limits, read_target_config
from longdraft.models.passes import Pass

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=None,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GROUP = 32
LLAMA = LlamaConfig(**SIZES)
MOE = Qwen3MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32)
GPT_OSS = GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, sliding_window=8, rope_parameters=ROPE)


def drawn(*shape: int, seed: int, low: int = 0, high: int = 16) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_like(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 0.03 + 0.01


def words(numbers_MN: Tensor, bits: int, order=None) -> Tensor:
    """Pack numbers into int32, the first of each word in its lowest bits, or in another order."""
    each, out = 32 // bits, []
    for row in numbers_MN.tolist():
        chunks = [row[i : i + each] for i in range(0, len(row), each)]
        found = [sum(chunk[place] << (bits * i) for i, place in enumerate(order or range(each))) for chunk in chunks]
        out.append([one - (1 << 32) if one >> 31 else one for one in found])
    return torch.tensor(out, dtype=torch.int32)


def by_group(numbers_KN: Tensor, zeros_GN: Tensor, scales_GN: Tensor, group_K: list[int]) -> Tensor:
    """The weight [N, K], computed input by input."""
    rows = [(numbers_KN[k] - zeros_GN[g]).float() * scales_GN[g].float() for k, g in enumerate(group_K)]
    return torch.stack(rows, 1)


def fp8(weight: Tensor, seed: int, block=(32, 48)) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    stored = (weight * 20).to(torch.float8_e4m3fn)
    scale, value = scales_like(-(-n // block[0]), -(-k // block[1]), seed=seed), stored.float()
    for i in range(n):
        for j in range(k):
            value[i, j] *= scale[i // block[0], j // block[1]]
    return {"weight": stored, "weight_scale_inv": scale, "input_scale": torch.ones(())}, value


def fp8_whole(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    stored, scale = (weight * 20).to(torch.float8_e4m3fn), scales_like(1, seed=seed)
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * scale.item()


def fp8_static(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoFP8 wrote it in 2024."""
    parts, value = fp8_whole(weight, seed)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"], "input_scale": torch.ones(1)}, value


def fp8_rows(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    stored, scale = (weight * 20).to(torch.float8_e4m3fn), scales_like(len(weight), 1, seed=seed).bfloat16()
    value = torch.stack([row.float() * float(s) for row, s in zip(stored, scale, strict=True)])
    return {"weight": stored, "weight_scale": scale}, value


def packed(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    (n, k), numbers = weight.shape, drawn(*weight.shape, seed=seed)
    scale = scales_like(n, k // GROUP, seed=seed).bfloat16()
    value = torch.stack([(numbers[:, j] - 8) * scale[:, j // GROUP].float() for j in range(k)], 1)
    parts = {"weight_packed": words(numbers, 4), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    return parts, value


def awq(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    n, k = weight.shape
    numbers, zeros = drawn(k, n, seed=seed), drawn(k // GROUP, n, seed=seed + 1)
    scale, order = scales_like(k // GROUP, n, seed=seed).half(), (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(numbers, 4, order), "qzeros": words(zeros, 4, order), "scales": scale}
    return parts, by_group(numbers, zeros, scale, [j // GROUP for j in range(k)])


def gptq(weight: Tensor, seed: int, bits: int = 4, act: bool = False, v2: bool = False):
    (n, k), most = weight.shape, 1 << bits
    numbers, zeros = drawn(k, n, seed=seed, high=most), drawn(k // GROUP, n, seed=seed + 1, high=most)
    scale, group = scales_like(k // GROUP, n, seed=seed).half(), [j // GROUP for j in range(k)]
    if act:
        group = [group[j] for j in torch.randperm(k, generator=torch.Generator().manual_seed(seed)).tolist()]
    stored = zeros if v2 else (zeros - 1) % most
    parts = {"qweight": words(numbers.T, bits).T.contiguous(), "qzeros": words(stored, bits), "scales": scale}
    return parts | {"g_idx": torch.tensor(group, dtype=torch.int32)}, by_group(numbers, zeros, scale, group)


def gptq_with_bias(weight: Tensor, seed: int, bias: float = 0.0) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoGPTQ packs a layer without a bias."""
    parts, value = gptq(weight, seed)
    return parts | {"bias": torch.full((len(weight),), bias, dtype=torch.float16)}, value


def compressed(form: str, **weights) -> dict:
    group = {"weights": {"symmetric": True, "actorder": None, **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
# By form: how a weight is packed, and the configuration.
FORMS = {
    "fp8": (fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48], "activation_scheme": "dynamic"}),
    "fp8 whole": (fp8_whole, {"quant_method": "fp8"}),
    "fp8 static": (fp8_static, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    "fp8 rows": (fp8_rows, compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "packed": (packed, compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, GPTQ),
    "gptq of 8 bits": (lambda weight, seed: gptq(weight, seed, bits=8), GPTQ | {"bits": 8}),
    "gptq v2": (lambda weight, seed: gptq(weight, seed, v2=True), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq with biases": (gptq_with_bias, GPTQ),
    "gptq by g_idx": (lambda weight, seed: gptq(weight, seed, act=True), GPTQ | {"desc_act": True}),
}


def write(folder, model, quantization, quantise, shards=1):
    """Save the model with quantised linear layers, and set its weights to what they stand for. Returns the folder."""
    model.save_pretrained(folder)
    tensors = {}
    for number, (name, weight) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        parts, value = quantise(name, weight, number)
        tensors |= parts
        if value is not None:
            model.get_parameter(name).data.copy_(value)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for shard in range(shards):
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / f"{shard}.safetensors")
    index = {name: f"{i % shards}.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def linear_layers(pack):
    def quantise(name, weight, number):
        if "_proj" not in name:
            return {name: weight}, None
        parts, value = pack(weight, number)
        module = name.removesuffix("weight")
        return {f"{module}{part}": tensor.contiguous() for part, tensor in parts.items()}, value

    return quantise


def made(config):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def assert_same(target, theirs):
    ids = torch.arange(40)[None] * 7 % 97
    expected = theirs(ids).logits
    found = target.model(Pass(ids)).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_the_model_is_that_of_the_numbers(tmp_path, form):
    """So it is if a weight's parts are in several files."""
    pack, quantization = FORMS[form]
    theirs = made(LLAMA)
    folder = write(tmp_path, theirs, quantization, linear_layers(pack), shards=3)
    target = load_target(folder, torch.float32)
    assert_same(target, theirs)
    assert read_target_config(folder) == target.model.config


def test_experts_too(tmp_path):
    theirs = made(MOE)
    by_name = linear_layers(fp8)
    theirs.save_pretrained(tmp_path / "plain")
    folder = write(tmp_path / "fp8", theirs, FORMS["fp8"][1], lambda *given: (by_name(*given)[0], None))
    # transformers stacks experts in memory, so an unquantised checkpoint brings the values there.
    tensors = {name: by_name(name, tensor, i) for i, (name, tensor) in enumerate(sorted(stored(tmp_path / "plain")))}
    values = {name: tensors[name][1] if tensors[name][1] is not None else t for name, t in stored(tmp_path / "plain")}
    save_file(values, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    assert_same(load_target(folder, torch.float32), AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval())


def stored(folder):
    return load_file(folder / "model.safetensors").items()


def test_gpt_oss_as_it_is_published(tmp_path):
    """Compared with the numbers that transformers makes of blocks and scales."""

    def quantise(name, weight, number):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: weight}, None
        experts, k, n = weight.shape
        blocks = drawn(experts, n, k // 32, 16, seed=number, high=256).to(torch.uint8)
        scales = drawn(experts, n, k // 32, seed=number, low=120, high=126).to(torch.uint8)
        value = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, value

    theirs = made(GPT_OSS)
    folder = write(tmp_path, theirs, {"quant_method": "mxfp4", "modules_to_not_convert": []}, quantise)
    target = load_target(folder, torch.float32)
    assert_same(target, theirs)


# The scales of activations and of the cache that AutoFP8, llm-compressor, Quark, ModelOpt and vLLM write for a layer's
# attention, under its own name or a part's.
SCALES = (
    "kv_scale", "k_proj.input_scale", "q_proj.activation_scale", "q_scale", "k_scale", "v_scale", "k_zero_point",
    "v_zero_point", "o_proj.input_zero_point", "k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale",
    "k_proj.output_zero_point", "prob_output_scale", "k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale",
    "qkv_proj.v_scale", "attn.q_scale", "attn.k_scale", "attn.v_scale", "attn.prob_scale",
)  # fmt: skip
NO_GROUPS = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": {"num_bits": 8}}


def plain(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": weight}, weight


# Of these only the cache is quantised.
OF_CACHE = {
    "null groups": (plain, NO_GROUPS | {"config_groups": None}),
    "no groups": (plain, NO_GROUPS),
}


@pytest.mark.parametrize("form", ["fp8 static", "fp8 rows", "packed", *OF_CACHE])
def test_scales_of_activations_and_of_the_cache_are_left_out(tmp_path, form):
    pack, quantization = (FORMS | OF_CACHE)[form]
    scales = {f"model.layers.{i}.self_attn.{name}": torch.ones(1) for i in range(2) for name in SCALES}
    by_name, theirs = linear_layers(pack), made(LLAMA)

    def quantise(name, weight, number):
        parts, value = by_name(name, weight, number)
        return parts | (scales if name == "lm_head.weight" else {}), value

    assert_same(load_target(write(tmp_path, theirs, quantization, quantise), torch.float32), theirs)


def test_a_part_that_is_not_there_is_named(tmp_path):
    folder = write(tmp_path, made(LLAMA), FORMS["awq"][1], linear_layers(awq), shards=2)
    tensors = load_file(folder / "0.safetensors")
    name = next(name for name in tensors if name.endswith("scales"))
    del tensors[name]
    save_file(tensors, folder / "0.safetensors")
    with pytest.raises(ValueError, match=r"1 quantised weights lack a part, such as .* scales"):
        load_target(folder)


def test_a_bias_that_has_no_place_is_named(tmp_path):
    pack = linear_layers(lambda weight, seed: gptq_with_bias(weight, seed, bias=0.5))
    folder = write(tmp_path, made(LLAMA), GPTQ, pack)
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.mlp\.down_proj\.bias \[64\]"):
        load_target(folder)


@pytest.mark.parametrize(
    ("field", "quantization"),
    [
        ("quant_method", {"quant_method": "bitsandbytes"}),
        ("version", FORMS["awq"][1] | {"version": "gemv"}),
        ("bits", FORMS["awq"][1] | {"bits": 8}),
        ("bits", GPTQ | {"bits": 3}),
        ("dynamic", GPTQ | {"dynamic": {"-:.*down": {}}}),
        ("num_bits", compressed("float-quantized", num_bits=4, type="float")),
        ("type", compressed("float-quantized", num_bits=8, type="int")),
        ("symmetric", compressed("pack-quantized", num_bits=4, type="int", symmetric=False)),
        ("format", compressed("marlin-24", num_bits=4, type="int")),
    ],
)
def test_other_forms_are_refused_before_anything_is_read(tmp_path, field, quantization):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict() | {"quantization_config": quantization}))
    for read in (load_target, read_target_config):
        with pytest.raises(ValueError, match=f"quantization_config: {field} "):
            read(tmp_path)
    assert read_limits(tmp_path, loader="transformers")[:2] == (128, 97), "transformers may support them"
