"""Makes conversations from Python code: the source "stdlib-chat", which needs no network.

Each docstring of some length gives one conversation, of a kind that a hash chooses:
document     the user shows the code without its docstring, the assistant writes the docstring
implement    the user gives signature and docstring, the assistant writes the body (of functions; no body is cut off)

All conversations of a file have the file's digest, so a whole file is held out or not: a class and its methods, or two
versions of one function, are never in both splits.
"""

import ast
import hashlib
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from longdraft.data_prep.documents import BadDocument, Conversation, Unusable, check_messages

MIN_DOCSTRING = 60  # characters, cleaned: a shorter one says hardly more than the name
MAX_CODE = 2400  # characters of code in a message: most conversations then fit in a row of 1024 tokens

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

# The fields of a node that hold statements. `ast.walk` visits all expressions too, which takes ten times as long.
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Parts:
    """A piece of code, divided at its docstring. head, quoted and body are dedented.

    what: "class", "method", ... head: decorators and signature; for a module, the code before its docstring. quoted:
    the docstring as it stands in the code. docstring: the same, cleaned. body: the code after it; "" if there is none,
    or if it is on the docstring's own line.
    """

    what: str
    head: str
    quoted: str
    docstring: str
    body: str


def read_docstrings(name: str, raw: bytes) -> Iterator[Conversation | BadDocument]:
    """One conversation for each docstring of at least MIN_DOCSTRING characters, in the order of the code.

    name: of the file; a conversation is named `name:line`, with the line where its docstring begins. raw: the file's
    bytes.
    """
    digest = hashlib.sha256(raw).digest()
    try:
        # As Python reads it: without a byte order mark, and with one kind of line end.
        text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        yield BadDocument(name, digest, "bad_utf8")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the code that is read, not about ours
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        yield BadDocument(name, digest, "bad_syntax")
        return
    lines = text.split("\n")
    for parent, node in _with_docstring(tree):
        parts = _parts(parent, node, lines)
        if len(parts.docstring) < MIN_DOCSTRING:
            continue
        document_name = f"{name}:{node.body[0].lineno}"
        try:
            yield Conversation(document_name, digest, check_messages(_messages(document_name, parts)))
        except Unusable as error:
            yield BadDocument(document_name, digest, error.why)


def _with_docstring(tree: ast.Module) -> list[tuple[ast.AST | None, Node]]:
    """All (enclosing node, module, class or function) that have a docstring, in the order of the code."""
    pairs: list[tuple[ast.AST | None, ast.AST]] = [(None, tree)]
    for parent, node in pairs:  # the list grows during the loop
        children = (child for block in BLOCKS for child in getattr(node, block, ()))
        pairs += ((node if isinstance(node, Node) else parent, child) for child in children)
    found = [(up, node) for up, node in pairs if isinstance(node, Node) and ast.get_docstring(node, clean=False)]
    return sorted(found, key=lambda pair: pair[1].body[0].lineno)


def _parts(parent: ast.AST | None, node: Node, lines: list[str]) -> Parts:
    statement = node.body[0]
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    assert isinstance(statement.value.value, str) and statement.end_lineno is not None
    if isinstance(node, ast.Module):
        what, first, last, margin = "module", 1, len(lines), 0
    else:
        what = (
            "class" if isinstance(node, ast.ClassDef) else "method" if isinstance(parent, ast.ClassDef) else "function"
        )
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last, margin = node.end_lineno or node.lineno, node.col_offset
    head = lines[first - 1 : statement.lineno - 1]
    before = lines[statement.lineno - 1].encode()[: statement.col_offset].decode()  # columns are counted in bytes
    if before.strip():  # def f(): "docstring"
        head.append(before)
    return Parts(
        what=what,
        head=_dedented(head, margin),
        quoted=_dedented(lines[statement.lineno - 1 : statement.end_lineno], statement.col_offset),
        docstring=inspect.cleandoc(statement.value.value).strip(),
        body=_dedented(lines[statement.end_lineno : last], statement.col_offset).strip("\n"),
    )


def _dedented(lines: list[str], margin: int) -> str:
    """The lines with up to `margin` leading blanks removed (lines of a text may begin further left)."""
    return "\n".join(line[min(margin, len(line) - len(line.lstrip())) :] for line in lines)


def _messages(name: str, parts: Parts) -> list[dict[str, str]]:
    choice = hashlib.sha256(f"{name}\0{parts.docstring}".encode(errors="surrogatepass")).digest()
    signature = _below(parts, parts.quoted)
    has_body = parts.what in ("function", "method") and parts.body.strip()
    if has_body and max(len(signature), len(parts.body)) <= MAX_CODE and choice[0] % 2:
        phrases, code, answer = IMPLEMENT, signature, _fenced(parts.body)
    else:
        phrases, code, answer = DOCUMENT, _bounded(_below(parts, parts.body or "...")), parts.docstring
    question = phrases[choice[1] % len(phrases)].format(what=parts.what)
    return [
        {"role": "user", "content": f"{question}\n\n{_fenced(code)}"},
        {"role": "assistant", "content": answer},
    ]


def _below(parts: Parts, code: str) -> str:
    """The head with this code below it, indented unless it is a module's."""
    if parts.what == "module":
        return f"{parts.head}\n{code}".strip("\n")
    return f"{parts.head.rstrip()}\n{textwrap.indent(code, ' ' * 4)}"


def _bounded(code: str) -> str:
    """At most MAX_CODE characters of the code, cut after a line; a last line "..." then says that it goes on."""
    if len(code) <= MAX_CODE:
        return code
    return code[: code.rfind("\n", 0, MAX_CODE - 4) + 1] + "..."


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
