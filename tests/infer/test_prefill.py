"""A prompt that goes through the target in one pass gives what it gives in chunks."""

import pytest
import torch

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.passes import Pass

NEW = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("dtype", "windows", "size"),
    [(torch.float32, None, 20), (torch.float32, (5, None), 20), *((torch.bfloat16, None, n) for n in (1, 20, 128))],
)
def test_a_prompt_gives_what_it_gives_in_chunks(request, tiny_target, dtype, windows, size):
    """Up to rounding; with the C kernels in bf16 to the last bit."""
    if dtype == torch.bfloat16:
        request.getfixturevalue("c_kernels")
    model = tiny_target(dtype=dtype, sliding_windows=windows, max_positions=256).model
    tokens = torch.randint(97, (1, size), generator=torch.Generator().manual_seed(size))
    whole, parts = model.new_cache(1, size), model.new_cache(1, size)
    model(Pass(tokens, cache=whole, needs={"last_kv"}))
    for chunk in tokens.split(3, dim=1):
        model(Pass(chunk, cache=parts, needs={"last_kv"}))
        parts.commit(None, torch.tensor([chunk.shape[1]]))
    allowed = 1e-5 if dtype == torch.float32 else 0
    torch.testing.assert_close(whole.keys, parts.keys, rtol=allowed, atol=allowed)
    torch.testing.assert_close(whole.values, parts.values, rtol=allowed, atol=allowed)


def test_prompts_go_through_the_target_one_by_one_in_chunks(tiny_target):
    """A prompt of one token needs no pass."""
    prompts = [[1] * 11, [3], [2] * 13, [5] * 30]
    target = tiny_target()
    alone = [Engine(target).generate([prompt], NEW)[0].tokens for prompt in prompts]
    engine, shapes = Engine(target, prefill_chunk=16), []
    target.model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].tokens_BT.shape)))
    assert [generation.tokens for generation in engine.generate(prompts, NEW)] == alone
    assert shapes == [(1, 10), (1, 12), (1, 16), (1, 13), *[(4, 1)] * NEW.max_new_tokens]
