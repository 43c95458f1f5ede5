"""Shared by the trainer's tests: a tiny Hugging Face target on disk, prepared rows, a config, ranks as processes."""

import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.comm import destroy_process_group, is_initialized
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from longdraft.data_prep.shards import FORMAT_VERSION, Row, write_shard
from longdraft.launch.train import main
from longdraft.models.files import write_json
from longdraft.models.hf import load_target
from longdraft.models.target import Target
from longdraft.train.launcher import free_port
from longdraft.train.ranks import Ranks, join_ranks, leave_ranks
from longdraft.train.tracking import read_metrics

VOCAB, SEQ_LEN, LONG = 97, 24, 312
TOKENSWIFT = ["draft.out_norm_init=target"]
# A softmax ignores what all keys of a query share, so some gradients of the keys' bias are pure rounding error, which a
# small eps would scale up to full steps.
LONGSPEC = [
    "draft.method=longspec", "draft.window=6", "draft.noise=3", "draft.final_norm=true", "optimizer.eps=1e-5",
    "heldout.every=10",
]  # fmt: skip
FEW = ["train.steps=8", "train.global_batch=4", "heldout.every=8"]
# On rows of `long_folder`, whose pieces are longer than a block of queries.
ANCHORED = [
    *LONGSPEC, f"data.seq_len={LONG}", "data.positions=anchor_offset", "data.max_position=2000", "data.sinks=2",
    "data.query_share=0.5", "draft.draft_vocab_size=80", "train.global_batch=2", "train.micro_batch=1",
]  # fmt: skip
# The loss changes within the run, and levels are drawn by weight.
ACCEPTANCE = [
    *ANCHORED, "train.loss=acceptance", "train.kl_steps=12", "train.level_weights=[1,0.5,0.25]", "heldout.every=10",
]  # fmt: skip
MIX = [*TOKENSWIFT, "train.loss=mix", "train.text_weight=0.25"]
# What every rank imports; the last two are imported when the first run begins.
PRELOADED = [
    "deepspeed", "longdraft.train.loop", "longdraft.launch.train", "deepspeed.runtime.zero.muon.muon_optimizer",
    "pandas",
]  # fmt: skip
CONFIG = """
target: {{path: {target}}}
data: {{path: {data}, seq_len: 24}}
train: {{run_dir: {run_dir}, steps: 20, global_batch: 8, micro_batch: 2, precision: fp32, save_every: 10}}
optimizer: {{peak_lr: 5e-3, warmup_steps: 4}}
heldout: {{every: 10, rows: 5, choices: 20}}
log: {{wandb: disabled}}
"""


@pytest.fixture(scope="session")
def saved_model() -> Callable[..., Path]:
    """(folder, config, seed) -> the folder, with a transformers model of this config. We draw its weights ourselves, so
    that they do not depend on how transformers initialises."""

    def save(folder: Path, config: PretrainedConfig, seed: int = 7) -> Path:
        model, generator = AutoModelForCausalLM.from_config(config), torch.Generator().manual_seed(seed)
        for name, weight in sorted(model.named_parameters()):
            weight.data.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory, saved_model) -> Path:
    """A Llama of 2 layers without a tokenizer."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    return saved_model(tmp_path_factory.mktemp("target"), config)


@pytest.fixture(scope="session")
def target(target_folder) -> Target:
    """`target_folder` in fp32; must not be changed."""
    return load_target(target_folder, torch.float32)


def write_rows(folder: Path, n_rows: int, seed: int, seq_len: int = SEQ_LEN) -> None:
    """Write a split of rows with two or three pieces, each a document, and a little padding. Of every four tokens the
    third and fourth follow from the first, so that the first two heads have something to learn."""
    generator = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64))
    rows, scale = [], seq_len // SEQ_LEN
    for i in range(n_rows):
        used = seq_len - i % 3
        borders = [0, (5 + i % 7) * scale, used] if i % 2 else [0, 3 * scale, (11 + i % 5) * scale, used]
        tokens = (generator.random_raw(used) % VOCAB).astype(np.int32)
        for offset in (2, 3):
            following = tokens[offset::4]
            following[:] = (tokens[0::4] * 3 + offset)[: len(following)] % VOCAB
        documents = [f"{seed}.{i}.{piece}" for piece in range(len(borders) - 1)]
        rows.append(Row(tokens, borders, [1, used], documents, list(range(len(borders) - 1))))
    write_split(folder, seq_len, rows)


def write_split(folder: Path, seq_len: int, *shards: Sequence[Row], fill_id: int = 0) -> None:
    """Write a prepared split with a shard of each of these sequences of rows."""
    folder.mkdir(parents=True)
    files = [write_shard(folder / f"shard-{i:05d}.arrow", rows, seq_len, fill_id) for i, rows in enumerate(shards)]
    manifest = {"format_version": FORMAT_VERSION, "seq_len": seq_len, "tokenizer_sha256": "none", "shards": files}
    write_json(folder / "manifest.json", manifest)


@pytest.fixture(scope="session")
def prepare() -> Callable[..., None]:
    """The function `write_split`."""
    return write_split


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    write_rows(folder / "train", 45, seed=1)
    write_rows(folder / "heldout", 9, seed=2)
    return folder


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory) -> Path:
    """Prepared rows of LONG tokens."""
    folder = tmp_path_factory.mktemp("data") / "long"
    write_rows(folder / "train", 14, seed=3, seq_len=LONG)
    write_rows(folder / "heldout", 4, seed=4, seq_len=LONG)
    return folder


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory, target_folder) -> list[str]:
    """Overrides: a target that gives NaN for the last token, and twelve rows, one of which has that token."""
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(target_folder, folder / "target")
    weights = load_file(target_folder / "model.safetensors")
    weights["model.embed_tokens.weight"][VOCAB - 1] = torch.nan
    save_file(weights, folder / "target" / "model.safetensors", metadata={"format": "pt"})
    tokens = (np.arange(12 * SEQ_LEN).reshape(12, SEQ_LEN) * 7 % (VOCAB - 1)).astype(np.int32)
    tokens[5, 13] = VOCAB - 1
    rows = [Row(row, [0, SEQ_LEN], [1, SEQ_LEN], [f"document {i}"], [0]) for i, row in enumerate(tokens)]
    write_split(folder / "data" / "train", SEQ_LEN, rows)
    write_split(folder / "data" / "heldout", SEQ_LEN, rows[:2])
    steps = ["train.steps=3", "train.global_batch=4", "optimizer.warmup_steps=1"]
    return [f"target.path={folder / 'target'}", f"data.path={folder / 'data'}", *steps]


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], list[float]]:
    """(run) -> the losses of its steps."""
    return lambda run: [record["loss"] for record in read_metrics(run) if "loss" in record]


@pytest.fixture(scope="session")
def config_file(tmp_path_factory, target_folder, data_folder) -> Path:
    folder = tmp_path_factory.mktemp("config")
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(target=target_folder, data=data_folder, run_dir=folder / "run"))
    return path


@pytest.fixture(scope="session")
def fork() -> "Callable[..., Forked]":
    """(script and its arguments, environment, working directory) -> a process that has done the slow imports."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return Forked


@pytest.fixture(scope="session")
def start_ranks(config_file, fork) -> "Callable[..., list[subprocess.Popen] | list[Forked]]":
    """`start_ranks(2, [{"train": [override, ...]}, ...])` starts two ranks of ranks.py, or of another script.

    They are forked from a process that has done the slow imports; with `fresh` they are started anew. `machines`: the
    folders in which equal shares of the ranks are, as torchrun starts them on machines without a shared file system.
    """

    def start(
        n_ranks: int,
        actions: Sequence[dict],
        script: str = "ranks.py",
        fresh: bool = False,
        machines: Sequence[Path] = (Path(),),
    ) -> "list[subprocess.Popen] | list[Forked]":
        of_one = n_ranks // len(machines)
        shared = {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(of_one), "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [str(Path(__file__).with_name(script)), str(config_file), json.dumps(actions)]
        started = [
            (machine, os.environ | shared | {"RANK": str(i * of_one + local), "LOCAL_RANK": str(local)})
            for i, machine in enumerate(machines)
            for local in range(of_one)
        ]
        if not fresh:
            return [fork(command, environment, machine) for machine, environment in started]
        return [
            subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                cwd=machine,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for machine, environment in started
        ]

    return start


class Forked:
    """The part of a text-mode `Popen` that the tests use, for a process of multiprocessing's fork server."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path = Path()):
        context = multiprocessing.get_context("forkserver")
        reader, says = context.Pipe(duplex=False)
        self.stdout = os.fdopen(os.dup(reader.fileno()), "r")
        given = {"script": command[0], "arguments": command[1:], "environment": environment, "says": says}
        given["folder"] = str(folder.resolve())
        started = str(Path(__file__).with_name("started.py"))
        self._process = context.Process(target=runpy.run_path, args=(started, {"given": given}))
        with _no_launcher():  # the fork server starts here, with one thread
            self._process.start()
        reader.close()
        says.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        said = ThreadPoolExecutor(1).submit(self.stdout.read)
        self.wait(timeout)
        return said.result(timeout), None


def finish(processes: "Sequence[subprocess.Popen | Forked]") -> str:
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs[0]


@pytest.fixture(scope="session")
def finish_ranks() -> "Callable[[Sequence[subprocess.Popen | Forked]], str]":
    """Wait for the ranks, assert that all exited with 0, and return rank 0's output."""
    return finish


@contextmanager
def _no_launcher() -> Iterator[None]:
    """An environment without a launcher's variables; on exit, removes those that a single rank sets."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")  # so that the patch restores it
            patch.delenv(name)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def no_launcher() -> Iterator[None]:
    with _no_launcher():
        yield


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """This process as the only rank. A module uses either this or `train_command`."""
    with _no_launcher():
        ranks = join_ranks()
        yield ranks
        leave_ranks(ranks)


@pytest.fixture(scope="session")
def train_command() -> Callable[..., tuple[int, str]]:
    """`train_command(config, ...)` runs launch/train.py in this process, and returns its status and output."""

    def call(*arguments: object) -> tuple[int, str]:
        printed = StringIO()
        with _no_launcher(), redirect_stdout(printed), redirect_stderr(printed):
            status = main([str(argument) for argument in arguments])
        if is_initialized():  # a command that failed has not left the group
            destroy_process_group()
        return status, printed.getvalue()

    return call


# Runs by number of ranks, as precision-ZeRO stage: HEADS of TokenSwift's chain, BLOCKS of LongSpec.
HEADS = {1: ["fp32-1", "fp32-3", "bf16-1", "bf16-3"], 2: ["fp32-1", "fp32-2", "fp32-3", "bf16-2", "bf16-3"]}
WHOLE = ("fp32-1-1", "bf16-1-1", "fp32-2-1")
BLOCKS = {1: ["fp32-1", "bf16-1"], 2: ["fp32-1", "fp32-3", "bf16-2"]}


@pytest.fixture(scope="session")
def runs(tmp_path_factory, start_ranks, long_folder, poisoned) -> Path:
    """A folder of finished runs, trained in as few processes as possible:

    {fp32,bf16}-{ranks}-{stage} of HEADS: linear_chain, 20 steps of WHOLE and 10 of the others; longspec-{fp32,bf16}-
    {ranks}-{stage} of BLOCKS: 8 of LongSpec; silu_chain, medusa, longspec, longspec-anchored: 20 on one rank in fp32,
    for golden losses; acceptance, mix: other losses; acceptance-again: resumed from step 10; offload-{stage},
    micro-{rows}, longspec-micro-1: should equal {longspec-,}fp32-1-1, over 10 and 8 steps;
    poisoned: 3 steps of LongSpec under ZeRO-3;
    output.txt: what one rank printed.
    """
    folder = tmp_path_factory.mktemp("runs")

    def train(name: str, *overrides: str) -> dict:
        half = name.startswith(("offload", "micro")) or (name.startswith(("fp32", "bf16")) and name not in WHOLE)
        return {"train": [f"train.run_dir={folder / name}", *overrides]} | ({"until": 10} if half else {})

    started = []
    for n_ranks in (1, 2):
        actions = []
        for prefix, cases, draft in (("", HEADS, TOKENSWIFT), ("longspec-", BLOCKS, [*LONGSPEC, *FEW])):
            for precision, stage in (case.split("-") for case in cases[n_ranks]):
                place = f"{prefix}{precision}-{n_ranks}-{stage}"
                actions.append(train(place, f"train.precision={precision}", f"train.zero_stage={stage}", *draft))
        if n_ranks == 1:
            actions.append(train("poisoned", *LONGSPEC, *poisoned, "train.zero_stage=3"))
            actions += _alone(folder, train, long_folder)
        started.append(start_ranks(n_ranks, actions))
    output, _ = (finish(processes) for processes in started)
    (folder / "output.txt").write_text(output)
    return folder


def _alone(folder: Path, train: Callable[..., dict], long_folder: Path) -> list[dict]:
    """The actions of the runs with a single rank."""
    actions = [
        train("silu_chain", "draft.kind=silu_chain"),
        train("medusa", "draft.method=medusa"),
        train("longspec", *LONGSPEC),
        train("longspec-anchored", *ANCHORED, f"data.path={long_folder}"),
    ]
    actions += [train("acceptance", *ACCEPTANCE, f"data.path={long_folder}"), train("mix", *MIX)]
    actions.append({"copy": [str(folder / "acceptance"), str(folder / "acceptance-again")], "without": ["step_000020"]})
    actions.append(train("acceptance-again", *ACCEPTANCE, f"data.path={long_folder}"))
    for stage in (2, 3):
        actions.append(
            train(f"offload-{stage}", *TOKENSWIFT, f"train.zero_stage={stage}", "train.offload_optimizer=true")
        )
    for rows in (1, 4):
        actions.append(train(f"micro-{rows}", *TOKENSWIFT, f"train.micro_batch={rows}"))
    actions.append(train("longspec-micro-1", *LONGSPEC, *FEW, "train.micro_batch=1"))
    return [*actions, train("fp32-1-1", *TOKENSWIFT)]  # this run is finished, and says so
