"""The index of n-grams and what is looked up in it equal brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters import prompt_lookup
from longdraft.infer.drafters.base import Request
from longdraft.infer.drafters.host import READ_AHEAD, HostDrafter, NgramIndex
from longdraft.infer.drafters.prompt_lookup import continuation, matches
from longdraft.infer.drafters.tokenswift import most_frequent
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.kernels import backend
from longdraft.models.kv_cache import KVCache

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def made(n, tokens):
    table = NgramIndex(n)
    table.extend(tokens)
    return table


def brute_ranking(tokens, n, first, k):
    starts = {}
    for start in range(len(tokens) - n + 1):
        if tokens[start] == first:
            starts.setdefault(tuple(tokens[start + 1 : start + n]), []).append(start)
    return sorted(starts, key=lambda gram: (len(starts[gram]), starts[gram][-1]), reverse=True)[:k]


@settings(max_examples=60, deadline=None)
@given(tokens=TOKENS, n=st.integers(2, 4), k=st.integers(0, 30))
def test_ranking_equals_counting_anew(tokens, n, k):
    table = made(1, tokens)
    for first in range(5):
        assert most_frequent(table, first, k, n) == brute_ranking(tokens, n, first, k)


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


def test_the_longest_match_comes_first_and_a_loop_goes_on():
    index = NgramIndex(2)
    index.extend([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    # "1 2 3" stood at the beginning, "2 3" once more behind it.
    assert matches(index, 2) == [(3, 3), (2, 7)]
    assert continuation(index.tokens, 3, 4) == [4, 9, 2, 3]
    index.extend([1, 2, 3])
    assert matches(index, 1)[0] == (3, 11)
    assert continuation(index.tokens, 11, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def state_of(sequences):
    history = History(len(sequences), 400)
    for slot, tokens in enumerate(sequences):
        history.start(slot, tokens)
    sampling = SlotSampling([SamplingParams()] * len(sequences), torch.device("cpu"))
    positions = torch.tensor([len(tokens) - 1 for tokens in sequences])
    roots = torch.tensor([tokens[-1] for tokens in sequences])
    return SlotState(roots, positions, torch.ones(len(sequences), dtype=torch.bool), history, sampling, [])


@pytest.mark.parametrize("committed", [0, 6, 1000])
@pytest.mark.parametrize("free", [True, False])
def test_tables_catch_up_with_the_history(monkeypatch, free, committed):
    """Whatever the host has heard of, and with slots that have no table. A slot whose table lacks more than is read
    proposes nothing."""
    monkeypatch.setattr(backend, "is_host", lambda device: free)
    sequences = [list(range(n)) for n in (1, READ_AHEAD + 5, 3 * READ_AHEAD, 7)]
    drafter, caught_up = HostDrafter(), {}
    drafter.fill = lambda trie, node, table, max_nodes: caught_up.update({trie.tokens[0]: table.tokens[:]})
    drafter.longest_ngram = 2
    for slot in range(3):
        drafter.on_start(slot, Request(slot, [0] if slot < 2 else [], SamplingParams()), KVCache(1, 4, 1, 1, 1, None))
    drafter._tables[1].extend(sequences[1][1:5])
    state = state_of(sequences)
    state.committed = [tokens[:committed] for tokens in sequences]
    tries = drafter.tries(state, drafter.device_rows(state).tolist(), 9)
    ready = sequences[: 3 if committed == 1000 else 2]
    assert caught_up == {tokens[-1]: tokens for tokens in ready}
    assert [trie.tokens for trie in tries] == [[tokens[-1]] for tokens in sequences]
