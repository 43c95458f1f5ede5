"""A tiny real checkpoint for the commands that decode."""

from pathlib import Path

import pytest

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="session")
def folder(tmp_path_factory, shared) -> Path:
    """A random model whose tokenizer splits many characters into bytes, in Hugging Face's form."""
    text = "the cat sat on the mat and the dog sat on the log. " * 40 + "naïve 世界 🙂 "
    folder = tmp_path_factory.mktemp("generate")
    return shared("tiny_checkpoint.py").save(folder, text, 290, seed=3, chat_template=TEMPLATE)
