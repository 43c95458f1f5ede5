import pytest

from longdraft.data_prep.shards import ShardSet
from longdraft.launch.prepare import main
from longdraft.models.fingerprint import tokenizer_hash


def test_command_prepares_text_for_a_real_target(tmp_path, make_corpus, read_back, smollm2, capsys):
    corpus = make_corpus(tmp_path / "corpus", 20)
    out = tmp_path / "new" / "out"
    argv = f"--source {tmp_path}/corpus --target smollm2-135m --out {out} --seq-len 128 --heldout-share 0.2 --workers 1"
    main(argv.split())
    assert f"documents) -> {out}\n" in capsys.readouterr().out
    train, heldout = ShardSet(out / "train"), ShardSet(out / "heldout")
    assert read_back(train, smollm2) | read_back(heldout, smollm2) == corpus
    assert train.manifest["tokenizer_sha256"] == tokenizer_hash(smollm2)
    assert train.manifest["vocab_size"] == 49152
    main([*argv.split(), "--max-bad-share", "0"])
    assert capsys.readouterr().out.startswith("Already prepared: ")
    with pytest.raises(SystemExit) as stop:
        main([*argv.split(), "--seed", "1"])
    assert stop.value.code == 2
    assert "prepare: error: " in (error := capsys.readouterr().err)
    assert "seed is 0 there and 1 here" in error


def test_wrong_values_do_not_wait_for_the_target(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(f"--source stdlib --target none --out {tmp_path} --seq-len 1".split())
    assert stop.value.code == 2
    assert "error: seq_len: " in capsys.readouterr().err
