"""Conversations out of Python code: the source "stdlib-chat", which needs no hub.

Each docstring of some length gives one conversation, of one of two kinds, chosen by a hash:
document     the user shows the code without its docstring, the assistant writes the docstring
implement    the user gives signature and docstring, the assistant writes the body (functions; no body is cut off)

All conversations of a file have its digest, so the held-out split takes whole files: a class and its methods, or two
versions of one function, are never on both sides.
"""

import ast
import hashlib
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from longdraft.data_prep.documents import BadDocument, Conversation, Unusable, check_messages

MIN_DOCSTRING = 60  # characters, cleaned: less says hardly more than the name
MAX_CODE = 2400  # characters of code in a message: most conversations fit into a row of 1024 tokens

DOCUMENT = (
    "Write the docstring of this {what}.",
    "Document the following {what}. Answer with the text of its docstring alone.",
    "What should the documentation string of this {what} say?",
    "Please read this Python {what} and write its documentation.",
    "The {what} below has no docstring. Give it one.",
    "Describe what this {what} does, for its users, as a docstring.",
)
IMPLEMENT = (
    "Write the body of this {what}.",
    "Implement the following {what} as its docstring says. Answer with the body alone.",
    "Here are the signature and the docstring of a {what}. What is its code?",
    "Complete this Python {what}.",
    "The body of the {what} below is missing. Please write it.",
)

# Fields of a node that hold statements; `ast.walk` goes through all expressions too, and takes ten times as long.
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parts:
    """A piece of code around its docstring; head, quoted and body are moved to the left margin.

    head: decorators and signature; of a module what stands before its docstring. quoted: the docstring as it stands in
    the code, docstring: cleaned. body: the code behind it, "" where there is none or on the docstring's own line.
    """

    what: str
    head: str
    quoted: str
    docstring: str
    body: str


def read_docstrings(name: str, raw: bytes) -> Iterator[Conversation | BadDocument]:
    """One conversation for each docstring of MIN_DOCSTRING characters or more, in the order of the code.

    name: of the file; a conversation's is `name:line`, the line where its docstring begins. raw: the file's bytes.
    """
    digest = hashlib.sha256(raw).digest()
    try:
        # As Python reads it: no byte order mark, one kind of line end.
        text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        yield BadDocument(name, digest, "bad_utf8")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the code that is read, not of ours
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        yield BadDocument(name, digest, "bad_syntax")
        return
    lines = text.split("\n")
    for parent, node in _with_docstring(tree):
        parts = _parts(parent, node, lines)
        if len(parts.docstring) < MIN_DOCSTRING:
            continue
        place = f"{name}:{node.body[0].lineno}"
        try:
            yield Conversation(place, digest, check_messages(_messages(place, parts)))
        except Unusable as error:
            yield BadDocument(place, digest, error.why)


def _with_docstring(tree: ast.Module) -> list[tuple[ast.AST | None, Node]]:
    """(what it stands in, the module, class or function) of all that have a docstring, in the order of the code."""
    pairs: list[tuple[ast.AST | None, ast.AST]] = [(None, tree)]
    for parent, node in pairs:  # grows on the way
        children = (child for block in BLOCKS for child in getattr(node, block, ()))
        pairs += ((node if isinstance(node, Node) else parent, child) for child in children)
    found = [(up, node) for up, node in pairs if isinstance(node, Node) and ast.get_docstring(node, clean=False)]
    return sorted(found, key=lambda pair: pair[1].body[0].lineno)


def _parts(parent: ast.AST | None, node: Node, lines: list[str]) -> Parts:
    said = node.body[0]
    assert isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    assert isinstance(said.value.value, str) and said.end_lineno is not None
    if isinstance(node, ast.Module):
        what, first, last, margin = "module", 1, len(lines), 0
    else:
        what = (
            "class" if isinstance(node, ast.ClassDef) else "method" if isinstance(parent, ast.ClassDef) else "function"
        )
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last, margin = node.end_lineno or node.lineno, node.col_offset
    head = lines[first - 1 : said.lineno - 1]
    before = lines[said.lineno - 1].encode()[: said.col_offset].decode()  # columns are counted in bytes
    if before.strip():  # def f(): "docstring"
        head.append(before)
    return Parts(
        what=what,
        head=_moved(head, margin),
        quoted=_moved(lines[said.lineno - 1 : said.end_lineno], said.col_offset),
        docstring=inspect.cleandoc(said.value.value).strip(),
        body=_moved(lines[said.end_lineno : last], said.col_offset).strip("\n"),
    )


def _moved(lines: list[str], margin: int) -> str:
    """The lines with at most `margin` blanks fewer at their beginnings (a text's lines may begin further left)."""
    return "\n".join(line[min(margin, len(line) - len(line.lstrip())) :] for line in lines)


def _messages(place: str, parts: Parts) -> list[dict[str, str]]:
    choice = hashlib.sha256(f"{place}\0{parts.docstring}".encode(errors="surrogatepass")).digest()
    given = _below(parts, parts.quoted)
    written = parts.what in ("function", "method") and parts.body.strip()
    if written and max(len(given), len(parts.body)) <= MAX_CODE and choice[0] % 2:
        phrases, code, answer = IMPLEMENT, given, _fenced(parts.body)
    else:
        phrases, code, answer = DOCUMENT, _bounded(_below(parts, parts.body or "...")), parts.docstring
    question = phrases[choice[1] % len(phrases)].format(what=parts.what)
    return [
        {"role": "user", "content": f"{question}\n\n{_fenced(code)}"},
        {"role": "assistant", "content": answer},
    ]


def _below(parts: Parts, code: str) -> str:
    """The head with this code below it, indented but in a module."""
    if parts.what == "module":
        return f"{parts.head}\n{code}".strip("\n")
    return f"{parts.head.rstrip()}\n{textwrap.indent(code, ' ' * 4)}"


def _bounded(code: str) -> str:
    """At most MAX_CODE characters of it, cut at a line's end; a last line "..." says that it goes on."""
    if len(code) <= MAX_CODE:
        return code
    return code[: code.rfind("\n", 0, MAX_CODE - 4) + 1] + "..."


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
