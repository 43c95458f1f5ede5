"""Counts the size of the code and prints it as a table: `python benchmarks/checks/house.py [ROOT]`.

Counted are the files that git tracks or would track. Generated files and results are not counted.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("train", "data_prep", "models", "kernels", "infer", "launch", "benchmarks")
C_SUFFIXES = {".c", ".h", ".inc"}


def tracked(root: Path) -> list[Path]:
    """The paths, relative to `root`, of files in the working tree that git does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({Path(name) for name in listed if name and (root / name).is_file()})


def counts(root: Path = ROOT) -> dict[str, dict]:
    """All figures: `totals` by name, `folders` (lines of Python) and `longest` (lines of the five longest files)."""
    texts = {path: (root / path).read_text() for path in tracked(root) if path.suffix in {".py", *C_SUFFIXES}}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    code = [path for path in texts if path.parts[0] in CODE and path.suffix == ".py"]
    tests = [path for path in texts if path.parts[0] == "tests" and path.suffix == ".py"]
    functions, found = list[int](), Counter[str]()
    for path in code:
        tree = ast.parse(texts[path])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                found["functions called check_*"] += node.name.lstrip("_").startswith("check_")
            found["raise"] += isinstance(node, ast.Raise) and node.exc is not None
            name = getattr(node, "id", "") or getattr(node, "attr", "")
            found["is_host outside kernels"] += name == "is_host" and path.parts[0] != "kernels"
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found["Not here:"] += "Not here:" in (ast.get_docstring(node) or "")
    functions.sort()
    totals = {
        "lines of Python without tests": sum(lines[path] for path in code),
        "lines of C": sum(count for path, count in lines.items() if path.suffix in C_SUFFIXES),
        "lines of tests": sum(lines[path] for path in tests),
        "files without tests": len(code),
        "files of over 400 lines": sum(lines[path] > 400 for path in code),
        "files of tests": len(tests),
        "lines of a function, median": functions[len(functions) // 2],
        "lines of a function, p90": functions[len(functions) * 9 // 10],
        **{name: found[name] for name in ("raise", "functions called check_*", "is_host outside kernels", "Not here:")},
    }
    folders = {folder: sum(lines[path] for path in code if path.parts[0] == folder) for folder in CODE}
    of_tests = Counter[str]()
    for path in tests:
        of_tests[f"tests/{path.parts[1]}" if len(path.parts) > 2 else "tests"] += lines[path]
    longest = sorted(code, key=lines.__getitem__, reverse=True)[:5]
    return {
        "totals": totals,
        "folders": folders | dict(sorted(of_tests.items())),
        "longest": {str(path): lines[path] for path in longest},
    }


def main() -> None:
    for title, figures in counts(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT).items():
        print(title)
        for name, value in figures.items():
            print(f"  {name:34}{value:8,}")


if __name__ == "__main__":
    main()
