"""What is computed of the answers of llama.cpp and of this runtime, here of decoders with known tokens and times."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest

from longdraft.benchmarks.checks import llama_cpp_peer
from longdraft.benchmarks.checks.llama_cpp_peer import BASE


def test_rates_ratios_and_equal_tokens(monkeypatch, capsys):
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    def decoder(pieces, first, later):
        """One that needs `first` seconds for the first of these pieces and `later` for each of the others."""

        def decode(prompt):
            for number, piece in enumerate(pieces):
                wait(later if number else first)
                yield piece

        return decode

    monkeypatch.setattr(llama_cpp_peer, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=wait))
    decoders = {BASE: decoder([[1], [2], [3], [4]], 0.5, 1.0), "ours": decoder([[1, 2], [3, 5]], 0.25, 0.5)}
    found = llama_cpp_peer._measure(decoders, [[7] * 8, [8] * 8], rounds=2)
    assert [one.tokens for one in found[BASE]] == [[1, 2, 3, 4]] * 4  # without the warm-up
    llama_cpp_peer._report(found, Namespace(rounds=2))
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["tokens_per_second"]
    assert figures[BASE] == pytest.approx({"prefill": 16, "decoding": 1, "over": 1, "same": [16, 16]})
    assert figures["ours"] == pytest.approx({"prefill": 32, "decoding": 4, "over": 4, "same": [12, 16]})
