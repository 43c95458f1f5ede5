"""Packaging: every code folder of the root is installed as `longdraft.<folder>`.

`longdraft` is a namespace package, and no code folder has an `__init__.py`. Transformers imports Hugging Face's package
`kernels`. A regular package of that name on the path would shadow it; a namespace folder never does.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# "benchmarks" itself has no modules. Listing it lets a checkout import the other folders in it too.
CODE = [
    "benchmarks", "benchmarks/drafters", "data_prep", "infer", "infer/choice", "infer/drafters", "infer/server",
    "infer/vllm_plugin", "kernels", "kernels/cpu", "kernels/triton", "launch", "models", "models/drafts", "train",
    "train/methods",
]  # fmt: skip
# Needed for training but not for decoding, so that serving a draft, for example in vLLM, does not require it.
TRAIN = ["deepspeed>=0.19,<0.20", "datasets>=4", "wandb>=0.30", "omegaconf>=2.3"]
SERVE = ["starlette>=0.41", "uvicorn>=0.34", "pydantic>=2.9"]
packages = {f"longdraft.{folder.replace('/', '.')}": folder for folder in CODE}
config_folders = ["configs", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "configs").rglob("*")) if p.is_dir())]
packages |= {f"longdraft.{folder.replace('/', '.')}": folder for folder in config_folders}

setup(
    name="longdraft",
    version="0.1.0",
    description="Trains draft modules for long-context speculative decoding and runs them exactly",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",  # the tested versions; the Makefile reads this line
    packages=list(packages),
    package_dir=packages,
    package_data={name: ["*.yaml", "*.jinja"] for name in packages if name.startswith("longdraft.configs")}
    | {"longdraft.kernels.cpu": ["*.c", "*.inc"], "longdraft.infer.server": ["*.html"]}
    | {"longdraft.models": ["shipped/*/*"]},
    install_requires=[
        # The oldest tested versions. Before 5.18 transformers misreads the end tokens of GGUF files and the text of
        # DeepSeek's tokenizers.
        "torch>=2.11",
        "transformers>=5.19,<6",
        "huggingface_hub>=1",
        "httpx>=0.27",
        "pyarrow>=19",
        "tokenizers>=0.21",
        # From 1.8 on it limits blanks in JSON as we ask; vLLM 0.32 needs an older one.
        "llguidance>=1.7,<2",
        # transformers needs these for targets that only have a tokenizer.model, such as Vicuna and LongChat. From 0.2.3
        # on, sentencepiece refuses a protobuf older than its own, and that of vLLM and wandb may be older.
        "sentencepiece>=0.2,<0.2.3",
        "protobuf>=5",
        "jinja2>=3.1.6",
        "safetensors>=0.6",
        "numpy>=1.26",
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "gguf>=0.17",
        "psutil>=5.9",
        "pydantic>=2.11",
        "filelock>=3.32",
    ],
    extras_require={
        "train": TRAIN,
        "serve": SERVE,
        # The versions tested with our drafts (infer/vllm_plugin/).
        "vllm": ["vllm>=0.32,<0.33"],
        "gpu": ["liger-kernel>=0.8.5", "triton>=3.6"],
        # Not in [gpu], because it has no binary wheel and takes an hour to compile. Without it PyTorch's own flash
        # kernels are used (kernels/backend.py). From 2.7 on, its log-sum-exps have the layout that we read.
        "flash-attn": ["flash-attn>=2.7"],
        # Faster kernels for prompts. Version 3 is for an H100 or H200 and needs CUDA 13, version 4 also serves a B200.
        "flash-attn-3": ["fa3-fwd>=0.0.3"],
        "flash-attn-4": ["flash-attn-4>=4.0.0b36"],
        # Liger and Triton also run on a CPU, under Triton's interpreter, which is how the tests use them. 3.9's takes a
        # broadcast boolean for an integer mask and refuses it; its compiler takes the kernels.
        "dev": [
            *TRAIN,
            *SERVE,
            "openai>=2",
            "liger-kernel>=0.8.5",
            "triton>=3.6,<3.9",
            # 9.2 hides the names to which pytest-xdist 3.8 appends groups, so tests of a group would be separated.
            "pytest>=8,<9.2",
            "pytest-timeout>=2",
            "pytest-xdist>=3.8",
            "hypothesis>=6",
            "ruff>=0.12",
            "basedpyright>=1.30",
            "scipy>=1.13",
        ],
    },
    entry_points={
        "console_scripts": ["longdraft=longdraft.launch.cli:main"],
        "vllm.general_plugins": ["longdraft=longdraft.infer.vllm_plugin.plugin:register"],
    },
)
