"""LongSpec's decoding by its authors' formulas, in plain PyTorch on the published tensors, against ours on the same.

Every node's logits are computed from its own path by itself, the target is transformers'. Contexts are below the window
of 512 rows, where the authors' program and the paper do the same.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import load_target
from longdraft.models.published import convert

TREE, NEW = (4, 16, 16, 16, 16), 32
TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


@pytest.fixture(scope="module")
def published(tmp_path_factory, shared, authors):
    """(folder of the target, folder of the draft): both look mostly at the last token, each with deviations of its own,
    so that the draft is right now and then."""
    root = tmp_path_factory.mktemp("authors")
    folder = shared("tiny_checkpoint.py").save(root / "target", TEXT, 290, seed=3)
    model = LlamaForCausalLM.from_pretrained(folder)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data *= 0.05
    model.save_pretrained(folder)
    authors.publish_longspec(root / "draft", load_target(folder, torch.float32), folder)
    path = root / "draft" / "model.safetensors"
    quiet = {name: t * 0.03 if "o_proj" in name or "down_proj" in name else t for name, t in load_file(path).items()}
    authors.write(path, quiet)
    return folder, root / "draft"


class Authors:
    """The program: a prompt's tokens, step by step."""

    def __init__(self, target, draft):
        self.target = LlamaForCausalLM.from_pretrained(target).eval()
        self.w, self.config = load_file(draft / "model.safetensors"), self.target.config
        self.hd = self.config.hidden_size // self.config.num_attention_heads
        self.closest = torch.inf  # log-probabilities between the last node of a level and the first that is left out

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.w[f"{name}.weight"]

    def project(self, x, name):
        """[rows, heads, head width]"""
        y = x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)
        return y.view(len(x), -1, self.hd)

    def rotate(self, x, positions):
        inverse = 1 / self.config.rope_parameters["rope_theta"] ** (torch.arange(0, self.hd, 2) / self.hd)
        angles = (positions[:, None] * inverse).repeat(1, 2)[:, None]
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    def attend(self, q, keys, values):
        """One query [1, heads, width] over all rows."""
        groups = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        weights = torch.einsum("qhd,khd->hqk", q, keys).div(self.hd**0.5).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def draft(self, tokens, keys, values):
        """Log-probabilities after the last token; keys, values: the target's last layer's, of the committed ones."""
        x = self.target.get_input_embeddings()(torch.tensor(tokens))
        at = torch.arange(len(tokens))
        h = self.norm(x, "input_layernorm")
        k = self.rotate(self.project(h, "self_attn.k_proj"), at)[-513:]
        v = self.project(h, "self_attn.v_proj")[-513:]
        x, h, at = x[-1:], h[-1:], at[-1:]
        q = self.rotate(self.project(h, "self_attn.q_proj"), at)
        x = x + self.attend(q, k, v) @ self.w["self_attn.o_proj.weight"].T
        h = self.norm(x, "post_self_attention_layernorm")
        q = self.rotate(self.project(h, "cross_attn.q_proj"), at)
        x = x + self.attend(q, keys, values) @ self.w["cross_attn.o_proj.weight"].T
        h = self.norm(x, "post_cross_attention_layernorm")
        gate, up = (h @ self.w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ self.w["mlp.down_proj.weight"].T
        return self.target.lm_head(x)[0].log_softmax(-1)

    def tree(self, tokens, keys, values):
        """The paths of all 68 nodes below the last token."""
        level, paths = [((), 0.0)], []
        for width in TREE:
            scores = torch.stack([self.draft([*tokens, *path], keys, values) + score for path, score in level])
            best, vocab = scores.flatten().topk(width + 1), scores.shape[1]
            self.closest = min(self.closest, float(best.values[-2] - best.values[-1]))
            level = [
                ((*level[int(i) // vocab][0], int(i) % vocab), float(score))
                for score, i in zip(best.values[:-1], best.indices[:-1], strict=True)
            ]
            paths += [path for path, _ in level]
        return paths

    @torch.no_grad()
    def generate(self, prompt, new_tokens):
        """The text, how many tokens each step brought, and the steps' trees as sets of paths."""
        tokens, lengths, trees = list(prompt), [], []
        while len(tokens) < len(prompt) + new_tokens:
            last = self.target(torch.tensor([tokens]), use_cache=True).past_key_values.layers[-1]
            keys, values = (x[0, :, :-1].transpose(0, 1) for x in (last.keys, last.values))
            paths, accepted = set(self.tree(tokens, keys, values)), ()
            while True:
                choice = int(self.target(torch.tensor([[*tokens, *accepted]])).logits[0, -1].argmax())
                if (*accepted, choice) not in paths:
                    break
                accepted = (*accepted, choice)
            tokens += [*accepted, choice]
            lengths.append(len(accepted) + 1)
            trees.append(paths)
        return tokens[len(prompt) :], lengths, trees


def paths_of(tree) -> set[tuple[int, ...]]:
    """The paths of a tree of one slot."""
    found, tokens = [()], tree.tokens[0].tolist()
    for token, parent in zip(tokens[1:], tree.parents[0, 1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def test_every_step_brings_what_the_authors_do(published, tmp_path, monkeypatch):
    """Same trees of 68 nodes, same text, same tokens in each step, and so the same tokens/step."""
    target_folder, source = published
    convert(source, tmp_path / "draft", str(target_folder))
    target = load_target(target_folder, torch.float32)
    options = {"extended": 16}  # all
    engine = Engine(target, "longspec", tmp_path / "draft", nodes=None, options=options)
    theirs = Authors(target_folder, source)
    every, propose, trees = [], engine.drafter.propose, []

    def watched(*args):
        trees.append(propose(*args))
        return trees[-1]

    monkeypatch.setattr(engine.drafter, "propose", watched)
    for prompt in (target.tokenizer(TEXT[:90]).input_ids, target.tokenizer(TEXT[300:720]).input_ids):
        text, lengths, their_trees = theirs.generate(prompt, NEW)
        trees.clear()
        params = SamplingParams(max_new_tokens=len(text), ignore_eos=True)
        pieces = list(engine.stream([prompt], params))
        assert pieces[-1].generation is not None and pieces[-1].generation.tokens == text
        assert [len(piece.tokens) for piece in pieces] == lengths
        assert [paths_of(tree) for tree in trees] == their_trees and {len(tree) for tree in their_trees} == {68}
        every += lengths
    assert theirs.closest > 1e-6 and 1 in every and 3 in every
    print(f"{sum(every) / len(every):.2f} tokens/step: {every}; closest {theirs.closest:.1e}")
