"""Prompt lookup: what it proposes on texts made for it, and that slots do not mix. The index of n-grams and what is
looked up in it equal brute force."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.budget import Budget
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters import prompt_lookup
from longdraft.infer.drafters.base import Request
from longdraft.infer.drafters.host import READ_AHEAD, HostDrafter, NgramIndex
from longdraft.infer.drafters.prompt_lookup import PromptLookup, matches
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.kernels import backend
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput


def state_of(sequences, capacity=256):
    """Slots that stand at the last token of each sequence; None is a slot without a request."""
    history = History(len(sequences), capacity)
    known = [tokens or [0] for tokens in sequences]
    for slot, tokens in enumerate(known):
        history.start(slot, tokens)
    sampling = SlotSampling([SamplingParams()] * len(sequences), torch.device("cpu"))
    positions = torch.tensor([len(tokens) - 1 for tokens in known])
    roots = torch.tensor([tokens[-1] for tokens in known])
    active = torch.tensor([tokens is not None for tokens in sequences])
    return SlotState(roots, positions, active, history, sampling, [[] for _ in sequences])


def begun(drafter, prompts):
    cache = KVCache(1, len(prompts), 1, 1, 1, torch.float32)
    for slot, prompt in enumerate(prompts):
        drafter.on_start(slot, Request(slot, prompt, SamplingParams(seed=0)), cache)
    return drafter


def proposed(sequence, max_nodes=100, **options):
    tree = begun(PromptLookup(**options), [sequence[:1]]).propose(state_of([sequence]), Budget(max_nodes))
    return tree, tree.paths()[0]


def test_the_longest_match_is_continued():
    #          0  1  2  3  4  5  6  7  8  9  10 11
    sequence = [1, 2, 3, 7, 8, 9, 2, 3, 5, 1, 2, 3]
    tree, paths = proposed(sequence, length=4, candidates=1)
    assert paths[:4] == [[7], [7, 8], [7, 8, 9], [7, 8, 9, 2]]
    _, both = proposed(sequence, length=2, candidates=2)
    # "1 2" in front of the last token stood at the beginning too; after the 3 there comes the 7 that is known already.
    assert {tuple(path) for path in both} == {(7,), (7, 8), (5,), (5, 1)}
    assert tree.tokens[0, 0] == 3 and both[0] == [7]


def test_a_loop_is_proposed_whole():
    _, paths = proposed([5, 1, 2, 1, 2], length=9, candidates=1)
    assert [1, 2, 1, 2, 1, 2, 1, 2, 1] in paths


def test_a_replaced_token_does_not_end_a_copy():
    """9 is new; what was copied up to it goes on after the token whose place it took."""
    source = [10, 11, 12, 13, 14, 15, 16]
    _, paths = proposed([*source, 0, 10, 11, 12, 9], length=3)
    assert paths == [[14], [14, 15], [14, 15, 16]]


def test_nothing_is_proposed_for_new_tokens_and_idle_slots():
    drafter = begun(PromptLookup(), [[1], [1], [1]])
    tree = drafter.propose(state_of([[1], None, [4, 5, 4, 5]]), Budget(100))
    assert tree.paths()[:2] == [[], []] and tree.paths()[2]
    assert tree.depths.max() == tree.width - 1 and torch.equal(tree.depths, tree.ancestors.sum(2) - 1)


@settings(max_examples=40, deadline=None)
@given(
    sequence=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    max_nodes=st.integers(0, 12),
    length=st.integers(1, 8),
    candidates=st.integers(1, 4),
)
def test_a_smaller_room_takes_the_first_nodes(sequence, max_nodes, length, candidates):
    options = {"length": length, "candidates": candidates}
    whole, paths = proposed(sequence, **options)
    tree, some = proposed(sequence, max_nodes, **options)
    drafter = PromptLookup(**options)
    assert some == paths[:max_nodes] and len(paths) <= drafter.max_nodes
    assert len({tuple(path) for path in paths}) == len(paths), "siblings carry different tokens"
    assert max(map(len, paths), default=0) <= drafter.max_depth
    assert whole.classes is not None and int(whole.classes.max()) < len(drafter.class_stages)
    assert torch.equal(tree.ancestors, replace(tree).ancestors) and torch.equal(tree.depths, replace(tree).depths)
    assert (tree.parents < torch.arange(tree.width)).all()


def test_classes_tell_long_matches_from_short_ones():
    """A match of 4 whose next 4 tokens were right is a match of 8; only a child of the root is a class apart."""
    text = list(range(20))
    long, _ = proposed([*text, 50, *text[4:12]], length=3, candidates=1)
    short, _ = proposed([*text, 50, *text[4:8]], length=8, candidates=1)
    assert long.classes is not None and short.classes is not None
    assert long.tokens[0].tolist() == [11, 12, 13, 14] and short.tokens[0].tolist() == list(range(7, 16))
    assert long.classes[0, 2] == short.classes[0, 6] and long.classes[0, 1] != short.classes[0, 5]
    assert len({*long.classes[0, 1:].tolist(), *short.classes[0, 1:].tolist()}) == 5, "8 and on; 4; 5; 6 and 7"


# The index of n-grams.

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def made(n, tokens):
    table = NgramIndex(n)
    table.extend(tokens)
    return table


def brute_matches(tokens, max_ngram, search, longest, enough, skipped):
    end, found = len(tokens) - skipped, {}

    def length(at):
        return next((m for m in range(min(at, longest)) if tokens[at - 1 - m] != tokens[end - 1 - m]), min(at, longest))

    for n in range(min(max_ngram, end), 0, -1):
        ends = [at for at in range(len(tokens), n - 1, -1) if tokens[at - n : at] == tokens[end - n : end]]
        found |= {at: length(at) for at in ends[:search] if at < end}
        if len(found) >= enough:
            break
    return sorted(((matched, at) for at, matched in found.items()), reverse=True)


@settings(max_examples=60, deadline=None)
@given(
    tokens=TOKENS,
    max_ngram=st.integers(1, 4),
    search=st.integers(1, 8),
    extra=st.integers(0, 8),
    enough=st.integers(1, 6),
    skipped=st.integers(0, 2),
)
def test_matches_equal_a_search_of_the_whole_text(tokens, max_ngram, search, extra, enough, skipped):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_lookup, "SEARCHED", search)
        patch.setattr(prompt_lookup, "LONGEST", longest := max_ngram + extra)
        found = matches(made(max_ngram, tokens), enough, skipped)
    assert found == brute_matches(tokens, max_ngram, search, longest, enough, skipped)


@pytest.mark.parametrize("committed", [0, 6, 1000])
@pytest.mark.parametrize("free", [True, False])
def test_tables_catch_up_with_the_history(monkeypatch, free, committed):
    """Whatever the host has heard of, and with slots that have no table. A slot whose table lacks more than is read
    proposes nothing."""
    monkeypatch.setattr(backend, "is_host", lambda device: free)
    sequences = [list(range(n)) for n in (1, READ_AHEAD + 5, 3 * READ_AHEAD, 7)]
    drafter, caught_up = HostDrafter(), {}
    drafter.fill = lambda trie, table, max_nodes: caught_up.update({trie.tokens[0]: table.tokens[:]})
    drafter.longest_ngram = 2
    for slot in range(3):
        drafter.on_start(slot, Request(slot, [0], SamplingParams()), KVCache(1, 4, 1, 1, 1, None))
    drafter.on_prefill(1, sequences[1], 0, 5, TargetOutput())
    state = state_of(sequences, 400)
    state.committed = [tokens[:committed] for tokens in sequences]
    tries = drafter.tries(state, drafter.device_rows(state).tolist(), 9)
    ready = sequences[: 3 if committed == 1000 else 2]
    assert caught_up == {tokens[-1]: tokens for tokens in ready}
    assert [trie.tokens for trie in tries] == [[tokens[-1]] for tokens in sequences]
