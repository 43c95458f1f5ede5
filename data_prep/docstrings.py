"""Makes conversations from Python code: the source "stdlib-chat", which needs no network.

Each docstring of at least MIN_DOCSTRING characters gives one conversation. A hash chooses its kind:
document     the user shows the code without its docstring, the assistant writes the docstring
implement    the user gives signature and docstring, the assistant writes the body (only for short enough functions)

All conversations of a file have the file's digest, so a whole file is held out or not: a class and its methods, or two
versions of one function, are never in both splits.
"""

import ast
import hashlib
import warnings
from collections.abc import Iterator

from longdraft.data_prep.documents import BadDocument, Conversation, Unusable, read_messages

MIN_DOCSTRING = 60  # characters, after cleaning: a shorter one says hardly more than the name
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

Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def read_docstrings(name: str, raw: bytes) -> Iterator[Conversation | BadDocument]:
    """One conversation for each docstring of at least MIN_DOCSTRING characters, in the order of the code.

    name: the file's; a conversation is named `name:line`, with the line where its docstring begins. raw: the file's
    bytes.
    """
    digest = hashlib.sha256(raw).digest()
    try:
        # As Python reads it: without a byte order mark, and with one kind of line end.
        text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the code that is parsed
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        yield BadDocument(name, digest, "bad_utf8" if isinstance(error, UnicodeDecodeError) else "bad_syntax")
        return
    lines = text.split("\n")
    documented = [node for node in ast.walk(tree) if isinstance(node, Node) and ast.get_docstring(node, clean=False)]
    for node in sorted(documented, key=lambda node: node.body[0].lineno):
        docstring, quoted = (ast.get_docstring(node) or "").strip(), node.body[0]
        if len(docstring) < MIN_DOCSTRING or lines[quoted.lineno - 1][: quoted.col_offset].strip():
            continue  # too short, or on the same line as its definition
        document_name = f"{name}:{quoted.lineno}"
        try:
            messages = read_messages(_messages(document_name, node, docstring, lines))
            yield Conversation(document_name, digest, messages)
        except Unusable as error:
            yield BadDocument(document_name, digest, error.why)


def _messages(name: str, node: Node, docstring: str, lines: list[str]) -> list[dict[str, str]]:
    """A question about the node's code, and the answer. lines: the file's."""
    what = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
    quoted, first, last, margin = node.body[0], 1, len(lines), 0
    if not isinstance(node, ast.Module):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last, margin = node.end_lineno, node.col_offset
    body = lines[quoted.end_lineno : last]
    solution = _dedented(body, quoted.col_offset).strip("\n")
    task = _dedented(lines[first - 1 : quoted.end_lineno], margin)
    choice = hashlib.sha256(f"{name}\0{docstring}".encode(errors="surrogatepass")).digest()
    is_short = max(len(task), len(solution)) <= MAX_CODE
    if what == "function" and solution.strip() and is_short and choice[0] % 2:
        phrases, code, answer = IMPLEMENT, task, _fenced(solution)
    else:
        shown = [*lines[first - 1 : quoted.lineno - 1], *(body if solution else [" " * quoted.col_offset + "..."])]
        phrases, code, answer = DOCUMENT, _dedented(shown, margin).strip("\n"), docstring
        if len(code) > MAX_CODE:
            code = code[: code.rfind("\n", 0, MAX_CODE - 4) + 1] + "..."
    question = phrases[choice[1] % len(phrases)].format(what=what)
    content = f"{question}\n\n{_fenced(code)}"
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _dedented(lines: list[str], margin: int) -> str:
    """The lines with up to `margin` leading blanks removed (lines of a string may be indented less)."""
    return "\n".join(line[min(margin, len(line) - len(line.lstrip())) :] for line in lines)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
