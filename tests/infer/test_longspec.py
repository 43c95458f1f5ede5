"""LongSpec's drafter: its logits are the whole-row network's on every node's path, its window's keys a fresh one's, its
beam a brute-force beam's; and decoding with it is plain decoding."""

import itertools
import weakref

import pytest
import torch

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.base import Request
from longdraft.infer.drafters.longspec import EXTENDED_ON_CPU, LongSpecDrafter, _CPasses, _fit
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.requests import read_requests
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, TokenTree
from longdraft.kernels.choice import gumbel_noise
from longdraft.kernels.cpu import draft_block
from longdraft.models.drafts.heads import Medusa, MedusaConfig
from longdraft.models.drafts.longspec import WIDTHS, LongSpec, LongSpecConfig, plan_queries
from longdraft.models.footprint import sizes
from longdraft.models.passes import Pass

VOCAB, WINDOW = 61, 8
SHAPES = {
    "mha": {"n_kv_heads": 4, "sliding_windows": (6, None)},
    "gqa": {"n_heads": 8, "n_kv_heads": 2, "head_dim": 16},
}
PROMPTS = [[5, 9, 2, 7, 11, 30, 2, 9, 4, 4, 1, 17, 3], [3], [8, 8, 21, 0, 6]]


@pytest.fixture(params=SHAPES)
def target(request, tiny_target):
    return tiny_target(vocab_size=VOCAB, **SHAPES[request.param])


def drafted(target, token_ids=None, **options) -> LongSpec:
    size = None if token_ids is None else len(token_ids)
    config = LongSpecConfig.for_target(target.model.config, window=WINDOW, draft_vocab_size=size, **options)
    draft = LongSpec(config, token_ids_E=token_ids)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in draft.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    return draft.to(target.model.lm_head.weight.dtype).requires_grad_(False)


@pytest.fixture(params=["C", "operations"])
def way(request, monkeypatch):
    """How the block is run; without the C kernels, by operations both times."""
    if request.param == "operations":
        monkeypatch.setattr(draft_block, "can_run", lambda weights, head_dim: False)
    return request.param


class Watched(LongSpecDrafter):
    """Keeps the nodes and logits of each pass of the last proposal."""

    def propose(self, state, budget):
        self.passes, logits_of = [], self._passes.logits

        def kept(state, nodes_BT, level, ancestors_BTN):
            logits_BTE = logits_of(state, nodes_BT, level, ancestors_BTN)
            self.passes.append((nodes_BT, logits_BTE))
            return logits_BTE

        self._passes.logits = kept
        try:
            return super().propose(state, budget)
        finally:
            del self._passes.logits


class Bench:
    """Slots whose text the test decides, in the place of the engine: no token of the draft need ever be accepted."""

    def __init__(self, target, drafter, texts, sampling=None):
        self.target, self.drafter, batch = target, drafter, len(texts)
        self.cache = target.model.new_cache(batch, 256)
        params = sampling or [SamplingParams() for _ in texts]
        zeros = torch.zeros(batch, dtype=torch.int64)
        self.texts = [list(text) for text in texts]
        slots = SlotSampling(params, torch.device("cpu"))
        active = torch.ones(batch, dtype=torch.bool)
        self.state = SlotState(zeros, zeros.clone(), active, History(batch, 256), slots, self.texts)
        for slot in range(batch):
            self.begin(slot, texts[slot])

    def begin(self, slot, text):
        self.texts[slot] = list(text)
        self.state.history.start(slot, text)
        self.drafter.on_start(slot, Request(slot, list(text), self.state.sampling.params[slot]), self.cache)
        self._place()

    def _place(self):
        """History, cache and positions as the texts say."""
        self.cache.reset()
        for slot, text in enumerate(self.texts):
            self.state.history.tokens[slot] = -7  # void; the drafter must not look there
            self.state.history.tokens[slot, : len(text)] = torch.tensor(text)
            self.state.roots[slot], self.state.positions[slot] = text[-1], len(text) - 1
            if len(text) > 1:
                one = self.cache.slot(slot)
                self.target.model(Pass(torch.tensor([text[:-1]]), cache=one, needs={"last_kv"}))
                one.commit(None, torch.tensor([len(text) - 1]))

    def propose(self, max_nodes=99):
        return self.drafter.propose(self.state, Budget(max_nodes))

    def commit(self, *new):
        """These tokens were committed, whatever was proposed."""
        counts = torch.tensor([len(tokens) for tokens in new])
        rows = torch.zeros(len(new), max(int(counts.max()), 1), dtype=torch.int64)
        for text, tokens in zip(self.texts, new, strict=True):
            text.extend(tokens)
        self._place()
        tree = TokenTree.roots(self.state.roots)
        self.drafter.on_step(self.state, tree, AcceptResult(rows, rows, counts), None)


def truth(target, draft, path, level) -> torch.Tensor:
    """Logits after a path, by the network's training form over the whole row."""
    tokens = torch.tensor(path)
    keys, values = target.model(Pass(tokens[None], needs={"last_kv"})).last_kv
    queries = plan_queries([0, len(path)], [level], draft.config.window)
    embeddings, positions = target.model.embed_tokens(tokens), torch.arange(len(path))
    state = draft.states(embeddings, positions, keys[0], values[0], queries)[-1]
    head = target.model.lm_head.weight
    return (head if draft.token_ids is None else head[draft.token_ids]) @ state


def assert_logits_are_the_networks(bench, tree):
    """Of every node that was a query, in every slot."""
    for slot, text in enumerate(bench.texts):
        paths = [[], *tree.paths()[slot]]
        node = 0
        for level, (nodes, logits) in enumerate(bench.drafter.passes, start=1):
            for row in range(nodes.shape[1]):
                path = text + paths[node]
                assert path[-1] == nodes[slot, row]
                expected = truth(bench.target, bench.drafter.draft, path, level)
                difference = (logits[slot, row] - expected).abs().max()
                assert difference < 2e-4, f"slot {slot}, level {level}, node {node}: {difference}"
                node += 1


def assert_window_is_a_fresh_one(bench):
    """Keys and values of the window before each root, by position."""
    passes, draft = bench.drafter._passes, bench.drafter.draft
    for slot, text in enumerate(bench.texts):
        tokens, positions = torch.tensor([text]), torch.arange(len(text))[None]
        k, v = draft.self_kv(bench.target.model.embed_tokens(tokens), draft.tables(positions))
        for position in range(max(0, len(text) - 1 - WINDOW), len(text) - 1):
            for kept, fresh in zip(passes.kept, (k[0, position], v[0, position]), strict=True):
                row = position % passes._n_positions
                torch.testing.assert_close(kept[slot, row], fresh, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["bounded", "rounded"])
def catching_up(request, monkeypatch):
    """What the ring lacks at most, as it is, and rounded up as where steps are recorded."""
    if request.param == "rounded":
        up = lambda state, count, usual, most: usual if count <= usual else most  # noqa: E731
        monkeypatch.setattr(SlotState, "rounded", up)
    return request.param


def test_logits_are_the_whole_rows_after_any_commits(target, catching_up, way):
    """Texts shorter and longer than the window and than the ring; the last commits are of unequal lengths. Any three
    of target, way, catching up and a restricted vocabulary meet."""
    generator = torch.Generator().manual_seed(3)
    restricted = (way == "C") ^ (catching_up == "rounded") ^ (target.model.config.n_heads == 8)

    def some(count):
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    ids = torch.randperm(VOCAB, generator=generator)[:17] if restricted else None
    drafter = Watched(target, drafted(target, ids), (2, 3, 3))
    bench = Bench(target, drafter, [some(3), some(1), some(64 + 2 * WINDOW)])
    steps = [
        lambda: None,
        lambda: bench.commit(some(1), some(4), some(2)),
        lambda: [bench.commit(some(3), [], some(1)) for _ in range(4)],  # steps in which nothing was proposed
        lambda: [(bench.propose(0), bench.commit(some(2), some(1), some(3))) for _ in range(2)],  # roots alone
        lambda: bench.commit(some(WINDOW + 3), some(2), some(12)),
        lambda: bench.begin(1, some(30)),
        lambda: bench.commit(some(1), some(1), some(1)),
    ]
    for step in steps:
        step()
        tree = bench.propose()
        assert tree.width == 9 and not (tree.parents == PAD).any()
        assert_logits_are_the_networks(bench, tree)
        assert_window_is_a_fresh_one(bench)


def brute_force(target, draft, text, widths, extended, sampling):
    """Every path of every level, best first, by the definition; the first `extended` of them are extended."""
    ids = torch.arange(VOCAB) if draft.token_ids is None else draft.token_ids
    beam, levels = [([], 0.0)], []
    for level, width in enumerate(widths, start=1):
        scored = []
        for path, score in beam[:extended]:
            logits = truth(target, draft, text + path, level).double()
            if sampling.temperature:
                noise = gumbel_noise(torch.tensor([sampling.seed]), torch.tensor([[len(text) - 1 + level]]), VOCAB)
                logits = logits / sampling.temperature + noise[0, 0, ids].double()
            gains = logits.log_softmax(0).tolist()
            scored += [([*path, int(v)], score + gain) for v, gain in zip(ids, gains, strict=True)]
        beam = sorted(scored, key=lambda one: -one[1])[:width]
        levels.append([path for path, _ in beam])
    return levels


@pytest.mark.parametrize(("temperature", "restricted"), [(0.0, False), (0.8, True)])
@pytest.mark.parametrize(
    "widths, extended",
    [(WIDTHS, 99), (WIDTHS, None), ((4, 16, 16, 16, 16), 16), ((1, 1, 1, 1), None), ((1, 7), 1), ((70, 3), 99)],
    ids=str,
)
def test_the_beam_is_the_brute_force_beam(target, widths, extended, temperature, restricted):
    """By sums of log-probabilities, at T > 0 with each position's noise; a level has no more nodes than there are."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:20] if restricted else None
    draft = drafted(target, ids)
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in (1, 2)]
    bench = Bench(target, LongSpecDrafter(target, draft, widths, extended), [PROMPTS[0], PROMPTS[2]], params)
    tree = bench.propose(max_nodes=999)
    for slot in range(2):
        expected = brute_force(target, draft, bench.texts[slot], widths, extended or EXTENDED_ON_CPU, params[slot])
        assert tree.paths()[slot] == [path for level in expected for path in level]


def test_children_differ_and_classes_say_how_sure_the_draft_was(target):
    drafter = LongSpecDrafter(target, drafted(target))
    tree = Bench(target, drafter, PROMPTS).propose(max_nodes=72)
    assert tree.width == 73 and drafter.max_nodes == 72 and drafter.max_depth == 5
    for slot in range(3):
        pairs = list(zip(tree.parents[slot].tolist(), tree.tokens[slot].tolist(), strict=True))
        assert len(set(pairs)) == 73
    assert tree.depths[0].bincount().tolist() == [1, 8, 16, 16, 16, 16]
    assert int(tree.classes.max()) < len(drafter.class_stages) and (tree.classes[:, 0] == 0).all()
    for level in range(1, 6):  # levels share no class, and what is likelier has the lower one
        mine = tree.classes[tree.depths == level]
        assert int(mine.min()) > 10 * (level - 1) and int(mine.max()) <= 10 * level
    best = tree.classes[:, 1:9]  # children of one parent, best first
    assert (best[:, 1:] >= best[:, :-1]).all()


@pytest.mark.parametrize("widths", [WIDTHS, (1, 1, 1), (9, 1, 4)], ids=str)
def test_less_room_makes_all_levels_narrower(widths):
    for max_nodes in range(sum(widths) + 3):
        fitted = _fit(widths, max_nodes)
        assert sum(fitted) == min(max_nodes, sum(widths)) and len(fitted) == min(max_nodes, len(widths))
        assert all(1 <= narrow <= width for narrow, width in zip(fitted, widths, strict=False))
    assert _fit(WIDTHS, 15) == [3, 3, 3, 3, 3] and _fit(WIDTHS, 34) == [6, 7, 7, 7, 7]


def test_slots_without_a_request_propose_nothing(target):
    bench = Bench(target, LongSpecDrafter(target, drafted(target), (2, 2)), PROMPTS)
    bench.state.active[1] = False
    tree = bench.propose()
    assert (tree.parents[1, 1:] == PAD).all() and not (tree.parents[[0, 2]] == PAD).any()


@pytest.mark.parametrize("restricted", [False, True])
def test_banned_tokens_are_not_proposed(target, restricted):
    """With two tokens left the tree is narrower than the beam; with none of the draft's own, it is empty."""
    ids = torch.tensor([4, 9, 33, 50]) if restricted else None
    drafter = LongSpecDrafter(target, drafted(target, ids), (4, 5))
    two = SamplingParams(banned_token_ids=tuple(set(range(VOCAB)) - {9, 50}))
    none = SamplingParams(banned_token_ids=(4, 9, 33, 50), temperature=1.0, seed=3)
    tree = Bench(target, drafter, PROMPTS[:2], [two, none]).propose()
    first, second = tree.paths()
    assert sorted(map(tuple, first)) == sorted([(9,), (50,), *itertools.product((9, 50), repeat=2)])
    assert all(not set(path) & {4, 9, 33, 50} for path in second) and (second == []) is restricted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("widths", [(1, 1, 1, 1, 1), WIDTHS], ids=["chain", "beam"])
def test_a_draft_that_knows_the_target_is_always_right(memoryless, widths, temperature):
    """When sampling, too, since it ranks with the noise of the positions that it proposes.

    A beam may lose the best path of a node to better sums elsewhere, so it is only nearly always right then.
    """
    target, draft = memoryless
    params = [SamplingParams(temperature=temperature, seed=seed, max_new_tokens=36) for seed in range(3)]
    engine = Engine(target, LongSpecDrafter(target, draft, widths, 16), nodes=None)
    for generation in engine.generate(PROMPTS, params):
        beam = temperature and len(widths) > 1 and max(widths) > 1
        assert generation.tokens_per_step >= 5 if beam else generation.tokens_per_step == 6


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(tiny_target, dtype):
    """The pieces agree with the whole-row network within the precision of the dtype."""
    target = tiny_target(vocab_size=VOCAB, dtype=dtype)
    bench = Bench(target, Watched(target, drafted(target), (2, 3, 3)), PROMPTS)
    tree = bench.propose()
    for slot, (nodes, logits) in itertools.product(range(3), [bench.drafter.passes[1]]):
        for row in range(2):
            path = [*bench.texts[slot], int(nodes[slot, row])]
            expected = truth(target, bench.drafter.draft, path, 2).float()
            allowed = 30 * torch.finfo(dtype).eps * float(expected.abs().max())
            assert (logits[slot, row].float() - expected).abs().max() < allowed
    assert tree.width == 9


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_what_it_allocates(tiny_target, dtype):
    target = tiny_target(vocab_size=VOCAB, dtype=dtype)
    for ids in (None, torch.arange(10)):
        drafter = LongSpecDrafter(target, drafted(target, ids))
        bench = Bench(target, drafter, PROMPTS)
        passes, told = drafter._passes, sizes(drafter.allocations(3, bench.cache.capacity))
        assert told["draft window"] == sum(kept.nbytes for kept in passes.kept)


def test_what_cannot_be_is_refused(tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    draft = drafted(target)
    for field, given, widths in [
        ("widths", draft, ()),
        ("widths.1", draft, (4, 0)),
        ("widths", draft, (1,) * 9),
        ("draft", drafted(target).to(torch.bfloat16), (4,)),
        ("draft", Medusa(MedusaConfig(32)), (4,)),
    ]:
        with pytest.raises(ValueError, match=field):
            LongSpecDrafter(target, given, widths)
    for field, other in (("n_kv_heads", 4), ("vocab_size", 97), ("hidden_size", 64), ("head_dim", 16)):
        with pytest.raises(ValueError, match=f"draft: {field} is .* made for this target"):
            LongSpecDrafter(tiny_target(**({"vocab_size": VOCAB} | {field: other})), drafted(target), (4,))


@pytest.mark.usefixtures("way")
def test_nothing_of_a_cache_is_left_after_a_release(target):
    drafter = LongSpecDrafter(target, drafted(target), widths=(3, 4))
    engine = Engine(target, drafter)
    first = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=9))[0].tokens
    caches = weakref.ref(engine.runner.cache), weakref.ref(drafter._passes)
    engine.runner.cache = None
    drafter.release()
    assert [one() for one in caches] == [None, None]
    assert engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=9))[0].tokens == first


def test_free_slots_at_the_end_stay_out_of_the_blocks_passes(target, way):
    """By the C kernels, which take as long as they have rows; and the tree of the others is what it was."""
    drafter = Watched(target, drafted(target), widths=(3, 4))
    bench = Bench(target, drafter, [PROMPTS[0], PROMPTS[1], [5], [6]])
    whole = bench.propose()
    assert len(drafter.passes[0][0]) == 4
    for slot in (2, 3):
        bench.texts[slot].clear()
        bench.state.active[slot] = False
    tree = bench.propose()
    fewer = way == "C" and isinstance(drafter._passes, _CPasses)
    assert {len(nodes_BT) for nodes_BT, _ in drafter.passes} == {2 if fewer else 4}
    assert torch.equal(tree.tokens[:2], whole.tokens[:2]) and torch.equal(tree.parents[:2], whole.parents[:2])
    assert tree.tokens[2:, 0].tolist() == bench.state.roots[2:].tolist()
    assert tree.parents[2:, 0].tolist() == [-1, -1] and bool((tree.parents[2:, 1:] == -2).all())


@pytest.mark.usefixtures("way")
def test_a_slot_whose_prompt_is_read_meanwhile_has_its_keys(target):
    """It has no text yet in the proposal that catches up with it."""
    drafter = LongSpecDrafter(target, drafted(target), widths=(3, 4))
    engine = Engine(target, drafter, slots=2, max_length=128, prefill_chunk=8, nodes=None)
    prompts = [PROMPTS[0], [i % 61 for i in range(40)]]
    first, second = read_requests(target, prompts, SamplingParams(max_new_tokens=40), 128)
    came = iter([[first], [], [second]])
    for piece in engine.serve(lambda idle: next(came, [])):
        if piece.index == 1:
            break
    assert len(engine.pool.sequences[0].committed) > len(PROMPTS[0]) + 3  # it was decoded meanwhile
    kept_P = drafter._passes.kept[0][1].flatten(1).float().abs().sum(1)
    assert int((kept_P > 0).sum()) >= WINDOW - 1


@pytest.mark.usefixtures("way")
def test_embeddings_that_a_class_of_its_own_computes_go_their_own_way(target, tiny_target):
    """As a model of transformers may have; a plain table is read as it is."""

    class Doubled(torch.nn.Embedding):
        def forward(self, input):
            return 2 * super().forward(input)

    draft, weight = drafted(target), target.model.embed_tokens.weight.detach().clone()
    trees = []
    for kind, factor in ((torch.nn.Embedding, 1.0), (Doubled, 0.5), (torch.nn.Embedding, 0.5)):
        target.model.embed_tokens = kind(*weight.shape).requires_grad_(False)
        target.model.embed_tokens.weight.copy_(factor * weight)
        drafter = LongSpecDrafter(target, draft)
        bench = Bench(target, drafter, PROMPTS)
        trees.append(bench.propose())
        assert kind is torch.nn.Embedding or not isinstance(drafter._passes, _CPasses)
    assert torch.equal(trees[0].tokens, trees[1].tokens) and not torch.equal(trees[0].tokens, trees[2].tokens)


@pytest.mark.parametrize(("levels", "noise"), [(4, 3), (5, 3)])
def test_a_tree_that_is_two_levels_deeper_than_the_training_gets_a_warning(target, recwarn, levels, noise):
    LongSpecDrafter(target, drafted(target, noise=noise), widths=(2,) * levels)
    assert [str(one.message).split(":")[0] for one in recwarn] == ["widths"] * (levels > noise + 1)
