"""triton/tuning.py: variants that differ by rounding alone, and choices that are measured once, kept and stay."""

import json
import multiprocessing
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from longdraft.kernels import tree_attention as public
from longdraft.kernels.tree import PassPlan
from longdraft.kernels.tree_attention import tree_attention_reference as reference
from longdraft.kernels.triton import tree_attention as module
from longdraft.kernels.triton import tuning
from longdraft.kernels.triton.tuning import PROGRAMS, TILES, Choice, fitted, variants

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
H100, RTX = 227 << 10, 99 << 10
SHAPE = tuning.shape_of(torch.float16, 1, 9, 8, 2, 64, 8192, None)
SLOW, FAST = 2.0, 1.0
DTYPE, ALLOWED = (torch.float16, 4e-3) if DEVICE.type == "cuda" else (torch.float32, 2e-6)  # fp32 compiles slowly there
# The interpreter knows neither stages nor warps.
UNLIKE = TILES if DEVICE.type == "cuda" else {(*tile[:2], tile.ahead): tile for tile in TILES}.values()


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing was chosen in this process, and the user's cache folder is empty."""
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "longdraft"


@dataclass
class Clock:
    """A timer by which one choice is the fastest; it runs nothing."""

    best: Choice | None
    asked: list[Choice | None] = field(default_factory=list)

    def __call__(self, call) -> float:
        self.asked.append(call.args[0])
        return FAST if self.asked[-1] == self.best else SLOW


def tune(best: Choice | None, outputs: dict[Choice | None, Tensor | Exception] | None = None, shape=SHAPE) -> Clock:
    """Tunes a shape by a clock. outputs: of choices whose output is not the table's."""

    def run(choice: Choice | None) -> Tensor:
        given = (outputs or {}).get(choice, torch.ones(3))
        if isinstance(given, Exception):
            raise given
        return given

    clock = Clock(best)
    tuning.tune(DEVICE, {shape: 9}, H100, lambda shape, n_rows: run, lambda line: None, clock)
    return clock


def next_process(monkeypatch) -> None:
    monkeypatch.setattr(tuning, "_chosen", {})


@pytest.mark.parametrize(("programs", "window"), [(1, None), (4, 90)])
@pytest.mark.parametrize("tile", UNLIKE, ids=str)
def test_every_variant_gives_the_references_output(trees, merged, tile, programs, window):
    lengths, n_rows = [130, 5], 17
    keys, values = (x.to(DTYPE) for x in trees.poisoned(lengths, n_rows, max(lengths) + n_rows, 1, 16))
    q, lengths_B = trees.draw(2, n_rows, 8, 16, seed=7).to(DTYPE), torch.tensor(lengths)
    masks = torch.stack([trees.random_tree(n_rows, seed) for seed in range(2)])
    masks[:, -1, -1] = True
    wanted = reference(q.float(), keys, values, lengths_B, masks, window)[0]
    plan = PassPlan(lengths_B, n_rows, masks)
    given = [x.to(DEVICE) for x in (q, keys, values, lengths_B, plan.bits_BT2, plan.depth_BT)]
    out, _ = module.tree_attention(*given, window, choice=tile._replace(programs=programs))
    assert (out.cpu() - wanted).abs().max() < ALLOWED


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("fast_memory", [H100, 140 << 10, RTX])
def test_variants_fit_the_device_and_are_few(width, fast_memory):
    for n_rows in (1, 16, 128):
        shape = tuning.shape_of(torch.bfloat16, 1, n_rows, 32, 8, width, 1 << 16, None)
        found = variants(shape, fast_memory)
        tiles = {choice._replace(programs=0) for choice in found}
        assert len(found) == len(set(found)) == len(PROGRAMS) * len(tiles) and 2 <= len(tiles) <= 10
        for tile in tiles:
            assert (tile.queries + (2 * tile.stages + tile.ahead) * tile.keys) * width * 2 <= fast_memory
            assert tile.queries <= max(16, 4 * n_rows) and (tile.warps == 4 or tile.queries >= 128)


def test_a_narrow_pass_has_small_blocks_of_queries():
    assert fitted(Choice(128, 64, 3, 8, 2), 512) == (128, 64, 3, 8, 2, 0)
    assert fitted(Choice(256, 64, 4, 8, 2), 65) == (128, 64, 4, 8, 2, 0)
    assert fitted(Choice(128, 64, 3, 8, 2, 1), 33) == (64, 64, 3, 4, 2, 1)
    assert fitted(Choice(64, 64, 3, 4, 2, 1), 32) == (32, 64, 3, 4, 2, 0)


def test_the_fastest_is_chosen_and_what_fails_or_is_wrong_is_dropped():
    best, too_large, broken, wrong, nan = variants(SHAPE, H100)[3:8]
    outputs = {
        too_large: module.triton.OutOfResources(1, 0, "shared memory"), broken: RuntimeError("no kernel image"),
        wrong: torch.ones(3) + 1e-3, nan: torch.full((3,), float("nan")), best: torch.ones(3) + 1e-7,
    }  # fmt: skip
    clock = tune(best, outputs)
    assert tuning.chosen(DEVICE, SHAPE) == best
    assert set(clock.asked) == {None, *variants(SHAPE, H100)} - {too_large, broken, wrong, nan}
    assert tuning.chosen(DEVICE, SHAPE._replace(n_rows=1)) is None


@pytest.mark.parametrize("best", [None, variants(SHAPE, H100)[4]])
def test_a_choice_is_measured_once_and_then_read(monkeypatch, fresh, best):
    assert tune(best).asked
    tune(variants(SHAPE, H100)[0], shape=SHAPE._replace(window=9000))
    next_process(monkeypatch)
    assert not tune(variants(SHAPE, H100)[0]).asked
    found = tuning.chosen(DEVICE, SHAPE)
    assert found == best and (best is None or isinstance(found, Choice))
    assert len(list(fresh.iterdir())) == 1


def test_a_choice_stays_for_the_whole_process():
    first, second = variants(SHAPE, H100)[:2]
    tune(first)
    assert not tune(second).asked and tuning.chosen(DEVICE, SHAPE) == first


def test_a_shape_that_was_launched_keeps_the_table():
    assert tuning.chosen(DEVICE, SHAPE) is None
    assert not tune(variants(SHAPE, H100)[1]).asked and tuning.chosen(DEVICE, SHAPE) is None


def other_card(monkeypatch, tmp_path) -> None:
    identity = tuning._identity
    monkeypatch.setattr(tuning, "_identity", lambda device: {**identity(device), "card": "another"})


def other_driver(monkeypatch, tmp_path) -> None:
    (tmp_path / "version").write_text("NVRM version: 999")
    monkeypatch.setattr(tuning, "DRIVER", tmp_path / "version")


def other_kernel(monkeypatch, tmp_path) -> None:
    (tmp_path / "kernel.py").write_text(tuning.SOURCES[1].read_text() + "#")
    monkeypatch.setattr(tuning, "SOURCES", (tuning.SOURCES[0], tmp_path / "kernel.py"))


OTHERS = {
    "card": other_card,
    "driver": other_driver,
    "kernel": other_kernel,
    "torch": lambda monkeypatch, _: monkeypatch.setattr(torch, "__version__", "0"),
    "triton": lambda monkeypatch, _: monkeypatch.setattr(module.triton, "__version__", "0"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_file_of_another_one_is_ignored_and_made_anew(monkeypatch, tmp_path, fresh, what):
    first, second = variants(SHAPE, H100)[:2]
    tune(first)
    next_process(monkeypatch)
    with monkeypatch.context() as changed:
        OTHERS[what](changed, tmp_path)
        assert tune(second).asked and tuning.chosen(DEVICE, SHAPE) == second
    assert len(list(fresh.iterdir())) == 2
    next_process(monkeypatch)
    assert not tune(second).asked and tuning.chosen(DEVICE, SHAPE) == first  # each has its own


def test_cards_are_told_apart_by_name_and_processors(monkeypatch):
    files = set()
    for name, processors in (("H100", 132), ("H100", 114), ("H200", 132)):
        card = SimpleNamespace(name=name, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        files.add(tuning._file(torch.device("cuda", 0)))
    assert len(files) == 3


DAMAGED = [
    "", "{", "[]", "3", "{}", '{"choices": 3}', '{"choices": {"NAME": 5}}', '{"choices": {"NAME": [7, 7, 7, 7, 7]}}',
    '{"choices": {"NAME": ["a"]}}', '{"choices": {"NAME": {}}}',
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_made_anew(monkeypatch, fresh, text):
    first, second = variants(SHAPE, H100)[:2]
    tune(first)
    (file,) = fresh.iterdir()
    (name,) = json.loads(file.read_text())["choices"]
    file.write_text(text.replace("NAME", name))
    next_process(monkeypatch)
    assert tune(second).asked
    next_process(monkeypatch)
    assert not tune(first).asked and tuning.chosen(DEVICE, SHAPE) == second


def test_a_folder_that_cannot_be_written_to_costs_only_the_file(monkeypatch):
    monkeypatch.setattr(tuning, "cache_path", lambda name: tuning.Path("/proc/nothing") / name)
    tune(TILES[0]._replace(programs=1))
    assert tuning.chosen(DEVICE, SHAPE) == TILES[0]._replace(programs=1)


def _write_often(file, name: str) -> None:
    for _ in range(200):
        tuning._write(file, torch.device("cpu"), {**tuning._read(file), name: TILES[0]})


def test_processes_that_write_at_once_leave_a_whole_file(fresh):
    fresh.mkdir()
    file, fork = fresh / "file.json", multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_often, args=(file, name)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(json.loads(file.read_text()) if file.exists() else {"choices": {}})
    assert [writer.exitcode for writer in writers] == [0, 0] and len(seen) > 1
    assert set(tuning._read(file)) <= {"one", "two"} and set(tuning._read(file).values()) == {TILES[0]}
    assert list(fresh.iterdir()) == [file]


def test_passes_are_measured_on_a_full_cache_and_launched_as_chosen(monkeypatch, merged):
    """From the widths of the passes to the numbers of a launch, on what the interpreter computes."""
    launches, capacity, kernel = [], 262, module._runs
    monkeypatch.setattr(module, "LEAST_KEYS", capacity)
    monkeypatch.setattr(module, "_device", lambda device: (8, RTX))
    monkeypatch.setattr(tuning, "PROGRAMS", (1,))
    monkeypatch.setattr(tuning, "TILES", (TILES[0], TILES[3]))

    class Spied:
        def __getitem__(self, grid):
            def launch(*args, **options):
                launches.append((args[5].tolist(), args[18], grid[1], options))
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(module, "_runs", Spied())
    best = Choice(16, 32, 4, 4, 1)
    clock, lines = Clock(best), []
    sizes = 6, 6, 16, [None, 40], torch.float16, DEVICE, capacity, 1
    module.tune(*sizes, [1, 3, 9], lines.append, clock)
    assert len(lines) == 2 and None in clock.asked and best in clock.asked
    # The widest pass of each kind, after all rows but its own; no layer whose window is short.
    assert {(lengths[0], rows) for lengths, rows, *_ in launches} == {(capacity - rows, rows) for rows in (1, 9)}
    launches.clear()
    q = torch.zeros(1, 5, 6, 16, dtype=torch.float16, device=DEVICE)
    keys = torch.zeros(1, capacity - 4, 6, 16, dtype=torch.float16, device=DEVICE)  # of the same power of two
    length = torch.tensor([9], device=DEVICE)
    tree = None, PassPlan(length, 5).depth_BT
    module.tree_attention(q, keys, keys, length, *tree)
    ((*_, n_splits, options),) = launches
    assert (options["BLOCK_M"], options["BLOCK_N"], options["num_stages"], options["num_warps"]) == best[:4]
    assert n_splits == 1  # 6 programs on 8 processors, where the table makes two runs
    module.tree_attention(q, keys, keys, length, *tree, 40)
    assert launches[1][3]["num_stages"] == 3  # the table


def test_what_is_not_worth_or_not_able_is_not_measured(monkeypatch):
    def tune(dtype=torch.float16, width=16, capacity=module.LEAST_KEYS, slots=1) -> None:
        module.tune(2, 2, width, [None], dtype, DEVICE, capacity, slots, [1], print, Clock(None))

    asked = []
    monkeypatch.setattr(tuning, "tune", lambda device, passes, *_: asked.append(len(passes)))
    for given in ({"dtype": torch.float32}, {"width": 256}):
        tune(**given)
    assert asked == []
    tune(capacity=module.LEAST_KEYS - 1)
    tune(capacity=module.LEAST_KEYS // 2, slots=2)
    assert asked == [0, 1]


def test_without_memory_the_table_serves(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(tuning, "tune", no_memory)
    module.tune(2, 2, 16, [None], torch.float16, DEVICE, module.LEAST_KEYS, 1, [1], print)


@pytest.mark.parametrize("exact", [False, True])
def test_exact_kernels_are_not_tuned(monkeypatch, exact):
    calls, kernels = [], SimpleNamespace(tune=lambda *args: calls.append(args))
    monkeypatch.setenv("LONGDRAFT_EXACT", str(int(exact)))
    monkeypatch.setattr(public.backend, "triton_kernels", lambda name, device: kernels)
    arguments = 2, 2, 16, [None, 7, None], torch.float16, torch.device("cpu"), 9000, 1, [1], print
    public.tune(*arguments)
    assert len(calls) == (not exact)
    if not exact:
        assert list(calls[0][3]) == [None, 7] and calls[0][:3] + calls[0][4:] == arguments[:3] + arguments[4:]


def test_the_clock_of_a_device(monkeypatch, pretended_cuda):
    monkeypatch.setattr(tuning, "COLD", 16)
    calls = []
    with pretended_cuda.PretendedCuda():  # between whose events a millisecond passes
        assert tuning.seconds_on(pretended_cuda.DEVICE, lambda: calls.append(1)) == 1e-3
    assert len(calls) == tuning.CALLS
