"""Conversations made from code: an example by hand, and the whole standard library."""

import ast
import hashlib
import textwrap

from longdraft.data_prep.docstrings import DOCUMENT, IMPLEMENT, MAX_CODE, MIN_DOCSTRING, read_docstrings
from longdraft.data_prep.documents import BadDocument, Conversation
from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import read_documents, scan
from longdraft.data_prep.sources import list_files

LONG = "Say in some more words than the name has what this is good for, so that it counts."
CODE = f'''#!/usr/bin/env python
"""{LONG} (module)"""

import os


@decorated(
    with_arguments=True
)
class Ship(Boat):
    """{LONG}
    Not indented.
        An indented line.
    """

    def short(self):
        """Too short."""

    if os.name == "posix":
        async def float(self, *, é="\\n"):  # a comment
            r"""{LONG} (float)"""
            text = """
at the left margin"""
            return text


def on_one_line(): "{LONG} (line)"


class Empty(Exception):
    """{LONG} (empty)"""
'''


def conversations(code, name="a/b.py"):
    found = list(read_docstrings(name, code.encode()))
    assert all(isinstance(one, Conversation) for one in found), found
    return [one for one in found if isinstance(one, Conversation)]


def parts(conversation):
    """(question, code of the question, answer)."""
    (asks, question), (says, answer) = (one.values() for one in conversation.messages)
    assert (asks, says) == ("user", "assistant")
    ask, _, fenced = question.partition("\n\n```python\n")
    assert fenced.endswith("\n```")
    return ask, fenced.removesuffix("\n```"), answer


def test_each_docstring_is_taken_out_of_its_code():
    found = {conversation.name: parts(conversation) for conversation in conversations(CODE)}
    assert list(found) == ["a/b.py:2", "a/b.py:11", "a/b.py:21", "a/b.py:31"]
    module, ship, method, empty = found.values()
    assert module[2] == f"{LONG} (module)"
    assert module[1].startswith("#!/usr/bin/env python\n\nimport os\n\n\n@decorated(\n")
    assert ship[1].startswith(
        '@decorated(\n    with_arguments=True\n)\nclass Ship(Boat):\n\n    def short(self):\n        """'
    )
    assert ship[2] == f"{LONG}\nNot indented.\n    An indented line."
    head, body = 'async def float(self, *, é="\\n"):  # a comment', 'text = """\nat the left margin"""\nreturn text'
    indented = '    text = """\nat the left margin"""\n    return text'
    assert method[1:] in [
        (f"{head}\n{indented}", f"{LONG} (float)"),
        (f'{head}\n    r"""{LONG} (float)"""', f"```python\n{body}\n```"),
    ]
    assert empty[1:] == ("class Empty(Exception):\n    ...", f"{LONG} (empty)")
    for (question, _, _), what in zip(found.values(), ["module", "class", "function", "class"], strict=True):
        assert what in question
    # All have the file's digest, so the whole file is in one split.
    assert {conversation.digest for conversation in conversations(CODE)} == {hashlib.sha256(CODE.encode()).digest()}


def test_line_ends_and_byte_order_marks_change_nothing():
    expected = [(one.name, one.messages) for one in conversations(CODE)]
    for other in (CODE.replace("\n", "\r\n"), CODE.replace("\n", "\r"), "\ufeff" + CODE):
        assert [(one.name, one.messages) for one in conversations(other)] == expected
    paged = CODE.replace("\nimport os\n", "\nimport os\n\f\n")  # a form feed ends no line of Python
    assert [one.name for one in conversations(paged)][1:] == ["a/b.py:12", "a/b.py:22", "a/b.py:32"]


def test_both_kinds_and_all_phrases_are_used_and_chosen_by_content():
    code = "".join(f'def f{i}(x):\n    """{LONG} {i}"""\n    return x + {i}\n\n\n' for i in range(200))
    found = [parts(one) for one in conversations(code)]
    assert found == [parts(one) for one in conversations(code)]
    used = {question for question, _, _ in found}
    assert used == {phrase.format(what="function") for phrase in (*DOCUMENT, *IMPLEMENT)}
    written = [(shown, answer) for _, shown, answer in found if answer.startswith("```")]
    assert 60 < len(written) < 140
    assert all('"""' in shown and "return" not in shown and "return x" in answer for shown, answer in written)


def test_code_is_bounded_and_bodies_are_never_cut():
    body = "".join(f"    x += {i}\n" for i in range(2 * MAX_CODE // 10))
    for i in range(20):
        ((_, shown, answer),) = map(parts, conversations(f'def f(x):\n    """{LONG} {i}"""\n{body}'))
        assert answer == f"{LONG} {i}"
        assert len(shown) <= MAX_CODE < len(shown) + 20
        assert shown.startswith("def f(x):\n    x += 0\n") and shown.endswith("\n...")


def test_what_is_no_python_is_named():
    digest = hashlib.sha256(b"def f(:").digest()
    assert list(read_docstrings("a.py", b"def f(:")) == [BadDocument("a.py", digest, "bad_syntax")]
    assert [one.why for one in read_docstrings("a.py", b'"\xff"') if isinstance(one, BadDocument)] == ["bad_utf8"]
    assert [one.why for one in read_docstrings("a.py", b"x\0") if isinstance(one, BadDocument)] == ["bad_syntax"]
    odd = f'def f():\n    """{LONG}\ufdd0"""\n'.encode()
    assert list(read_docstrings("a.py", odd)) == [BadDocument("a.py:2", hashlib.sha256(odd).digest(), "noncharacter")]
    half = f'def f():\n    """{LONG}\\ud800"""\n'.encode()
    assert [one.why for one in read_docstrings("a.py", half) if isinstance(one, BadDocument)] == ["noncharacter"]


def test_the_standard_library_gives_thousands():
    files = list_files([Source(path="stdlib-chat")])
    assert {file.kind for file in files} == {"docstrings"} and all(file.path.endswith(".py") for file in files)
    sources = {file.name for file in list_files([Source(path="stdlib")])}
    assert {file.name for file in files} < sources
    small = [
        file for file in files if file.name.partition("/")[2].startswith(("json/", "email/", "random", "idlelib/c"))
    ]
    found = [one for segment in scan(small, 1)[1] for one in read_documents(segment)]
    kept = [one for one in found if isinstance(one, Conversation)]
    assert len(kept) == len(found) > 200
    assert len({one.name for one in kept}) == len(kept)
    assert not any("/lib/" in one.name or one.name.startswith("/") for one in kept)
    for conversation in kept:
        _, shown, answer = parts(conversation)
        if answer.startswith("```python\n"):
            body = answer.removeprefix("```python\n").removesuffix("\n```")
            ast.parse(f"async def f():\n{textwrap.indent(body, '    ')}")
        else:
            assert len(answer) >= MIN_DOCSTRING and len(shown) <= MAX_CODE
            if not shown.endswith("\n..."):
                ast.parse(shown)
