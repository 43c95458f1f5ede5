"""`longdraft prepare regenerate` on a tiny real checkpoint and on SmolLM2.

The answers are those of a plain loop over the engine, whatever the batch and the drafter. `longdraft prepare` reads
them, with the loss on the answers.
"""

import json
import random
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import uvicorn
from transformers import Olmo2Config, Olmo2ForCausalLM

from longdraft.data_prep import regenerate as data_prep
from longdraft.data_prep.regenerate import answer_seed
from longdraft.data_prep.shards import ShardSet
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.server.app import Service, create_app
from longdraft.launch import cli
from longdraft.launch.prepare import main as prepare
from longdraft.launch.regenerate import main
from longdraft.models.hf import load_target, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "sat", "on", "the", "log"]
NEW = 40
SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=NEW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared) -> Path:
    """A random model in Hugging Face's format, with pieces of plain English, that ends its answers now and then."""
    folder, text = tmp_path_factory.mktemp("regenerate"), " ".join(WORDS * 9)
    how = {"chat_template": TEMPLATE, "ends": 3.0, "positions": 400, "ascii": True}
    return shared("tiny_checkpoint.py").save(folder, text, 160, seed=5, **how)


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, torch.float32)


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """24 conversations of one to three questions, and three invalid lines."""
    rng = random.Random(5)
    lines = []
    for i in range(24):
        messages = [{"role": "system", "content": "be brief"}] if i % 4 == 0 else []
        for _ in range(rng.randint(1, 3)):
            content = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "old"}]
        lines.append(json.dumps({"messages": messages[: len(messages) - i % 2]}))
    lines[7:7] = ["{", '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "system", "content": "s"}]}']
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_prep, "PART_SIZE", 5)
        yield


@pytest.fixture(scope="module")
def arguments(folder, chats):
    given = ["--source", chats, "--target", folder, "--dtype", "fp32", "--max-new-tokens", NEW]
    return [str(part) for part in [*given, "--temperature", 0.8, "--top-p", 0.9, "--seed", 4]]


@pytest.fixture(scope="module")
def answered(arguments, tmp_path_factory) -> Path:
    """The set answered without interruption, one conversation at a time, by plain decoding."""
    out = tmp_path_factory.mktemp("answered") / "out"
    assert main([*arguments, "--out", str(out), "--batch", "1"]) == 0
    return out


def records(out):
    return [json.loads(line) for path in sorted(out.glob("part-*")) for line in path.read_text().splitlines()]


def test_answers_are_those_of_a_plain_loop(target, chats, arguments, answered, capsys):
    """One conversation and turn at a time. Which conversations are kept: tests/data_prep/test_regenerate.py."""
    lines, found = chats.read_text().splitlines(), records(answered)
    for record in found:
        given = json.loads(lines[int(record["source"].rpartition(":")[2]) - 1])["messages"]
        places = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        for turn, place in enumerate(places):
            params = replace(SAMPLING, seed=answer_seed(4, given, turn))
            (done,) = Engine(target).generate([record["messages"][:place]], params)
            said = record["messages"][place]["content"]
            assert (done.finish_reason, done.text.removeprefix(" ")) == ("stop", said)
    assert len(found) > 5 and any(len(record["messages"]) > 4 for record in found)
    counts = json.loads((answered / "manifest.json").read_text())
    bad = {"bad_json": 1, "content_not_text": 1, "no_user_turn": 1}
    assert counts["bad"].items() >= bad.items() and (counts["input"], counts["success"]) == (27, len(found))
    settings = json.loads((answered / "plan.json").read_text())["settings"]
    assert (settings["temperature"], settings["seed"], settings["max_new_tokens"]) == (0.8, 4, NEW)
    capsys.readouterr()
    assert main([*arguments, "--out", str(answered)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Answered: ") and "Loading" not in shown.err


def test_answers_end_as_the_given_template_says(folder, arguments, answered, tmp_path):
    """Of a target whose own files name no end that it writes."""
    target = shutil.copytree(folder, tmp_path / "target")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((target / name).read_text())
        other = {"eos_token": "<|other|>"} if "eos_token" in content else {"eos_token_id": None}
        (target / name).write_text(json.dumps(content | other))
    template = (target / "chat_template.jinja").rename(tmp_path / "template.jinja")
    given = [*arguments, "--target", str(target), "--chat-template", str(template), "--out", str(tmp_path / "out")]
    assert main(given) == 0
    assert records(tmp_path / "out") == records(answered) != []


@pytest.mark.parametrize(
    "speed",
    ["--batch 3 --drafter prompt_lookup", "--batch 8 --drafter token_recycling --option nodes=20 --nodes 5"],
)
def test_batch_and_drafter_change_no_byte(arguments, answered, tmp_path, speed, files_of):
    assert main([*arguments, "--out", str(tmp_path / "out"), *speed.split()]) == 0
    assert files_of(tmp_path / "out") == files_of(answered)


def test_servers_of_the_target_give_the_same_answers(arguments, answered, target, tmp_path, files_of):
    """Two `longdraft serve` with other drafters and slots replace the engine, also where positions run out."""
    servers = []
    for drafter, slots in (("prompt_lookup", 3), ("token_recycling", 2)):
        service = Service(Engine(target, drafter, slots=slots, max_length=400), "tiny", queue=64)
        service.server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning"))
        listening = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=service.server.run, args=([listening],), daemon=True)
        thread.start()
        servers.append((f"http://127.0.0.1:{listening.getsockname()[1]}", service.server, thread))
    out, urls = tmp_path / "out", [url for url, _, _ in servers]
    at = arguments.index("--dtype")
    served = [*arguments[:at], *arguments[at + 2 :], "--endpoint", *urls]
    given = [*served, "--out", str(out), "--concurrency", "7"]
    assert main(given) == 0
    short, cut = tmp_path / "short", ["--max-length", "60", "--unfinished", "keep"]
    assert main([*arguments, *cut, "--out", str(short / "engine")]) == 0
    assert main([*served, *cut, "--out", str(short / "servers")]) == 0
    assert any("unfinished" in record for record in records(short / "engine"))
    assert records(short / "servers") == records(short / "engine")
    for _, server, thread in servers:
        server.should_exit = True
        thread.join(30)
    assert main(given) == 0, "a finished folder needs no server"
    parts = [name for name in files_of(answered) if name.startswith(("part-", "manifest"))]
    assert len(parts) > 3 and all((out / name).read_bytes() == (answered / name).read_bytes() for name in parts)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--dtype bf16 --max-length 401", "max_length"),
        ("--max-new-tokens 0", "max_new_tokens"),
        ("--chat-template absent", "--chat-template: "),
        ("--endpoint http://127.0.0.1:b", "--endpoint: 'http://127.0.0.1:b'"),
        ("--endpoint http://127.0.0.1:1 --dtype fp32", "--dtype"),
        ("--model m", "--model"),
        ("--text-field body", "--text-field"),
        ("--prompt-tokens 8 --chat-field m", "--chat-field"),
    ],
)
def test_errors(arguments, tmp_path, capsys, given, named):
    assert main([*arguments, "--out", str(tmp_path / "out"), *given.split()]) == 2
    assert named in capsys.readouterr().err and not list(tmp_path.glob("out/part*"))


@pytest.mark.parametrize("given", ["abc", "0", "5-x"])
def test_a_beginning_of_no_length_names_the_option(arguments, capsys, given):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--out", "never", "--prompt-tokens", given])
    assert f"--prompt-tokens: {given}; give a number" in capsys.readouterr().err


def test_a_family_that_only_transformers_computes(folder, chats, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "olmo2", ignore=shutil.ignore_patterns("*config.json", "*.safetensors"))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Olmo2Config(vocab_size=160, eos_token_id=0, pad_token_id=0, max_position_embeddings=200, **shape)
    Olmo2ForCausalLM(config).save_pretrained(tmp_path / "olmo2")
    shutil.copy(folder / "tokenizer_config.json", tmp_path / "olmo2")
    given = f"--source {chats} --target {tmp_path}/olmo2 --dtype fp32 --max-new-tokens 4 --unfinished keep".split()
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert "model_type 'olmo2' is not supported" in capsys.readouterr().err
    assert main([*given, "--out", str(tmp_path / "out"), "--loader", "transformers"]) == 0
    assert records(tmp_path / "out")


def test_a_folder_of_other_settings_and_prompts_that_are_too_long(arguments, answered, tmp_path, capsys):
    for given, named in (("--temperature 0.7", "temperature is 0.8"), ("--dtype bf16", "made_by is longdraft, fp32")):
        assert main([*arguments, "--out", str(answered), *given.split()]) == 2
        assert named in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "out"), "--max-length", "4"]) == 0
    assert "prompt_too_long: 24" in capsys.readouterr().out


def test_smollm2_answers_and_prepare_learns_its_answers(tmp_path, capsys):
    first, last = "What is the capital of France? Answer in one sentence.", "And of Italy?"
    old = {"role": "assistant", "content": "London."}
    chats = [[{"role": "user", "content": first}, old, {"role": "user", "content": last}]]
    chats += [[{"role": "user", "content": "What is 2 plus 2?"}]]
    chats += [[{"role": "user", "content": "Say hello in French."}, old]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    given = ["--source", str(tmp_path / "chats.jsonl"), "--target", "smollm2-135m", "--max-new-tokens", "16"]
    assert main([*given, "--drafter", "prompt_lookup", "--batch", "3", "--out", str(tmp_path / "out")]) == 0
    found = records(tmp_path / "out")
    answers = [m["content"] for record in found for m in record["messages"] if m["role"] == "assistant"]
    assert len(answers) == 3 and "Paris" in answers[0] and "Rome" in answers[1] and "4" in answers[2], answers
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["bad"] == {"unfinished": 1}
    given = ["--source", str(tmp_path / "out"), "--chat-field", "messages", "--target", "smollm2-135m"]
    prepare([*given, "--out", str(tmp_path / "rows"), "--seq-len", "256", "--heldout-share", "0"])
    for command, option in (("generate", "--heldout"), ("bench", "--data")):
        assert cli.main([command, "--target", "smollm2-135m", option, str(tmp_path / "rows")]) == 2
        assert "rows/heldout has no rows; prepare with --heldout-share" in capsys.readouterr().err
    tokenizer, rows, learned = load_tokenizer("smollm2-135m"), ShardSet(tmp_path / "rows" / "train"), []
    for i in range(len(rows)):
        row = rows[i]
        learned += tokenizer.decode(row["tokens"][row["loss"]]).split("<|im_end|>")[:-1]
    assert sorted(learned) == sorted(answers)
