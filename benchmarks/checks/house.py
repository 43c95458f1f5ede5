"""Counts lines of Python by folder, of C, and of the longest files: `python benchmarks/checks/house.py [ROOT]`.

It counts the files that git tracks or would track, but no generated files and no results.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    command += ["*.py", "*.c", "*.h", "*.inc"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    files = {Path(name) for name in listed if name and (root / name).is_file()}
    lines = {file: len((root / file).read_text().splitlines()) for file in files}
    folders = Counter[str]()
    for file, count in lines.items():
        folders["C" if file.suffix != ".py" else file.parts[0]] += count
    longest = sorted(lines, key=lambda file: (file.parts[0] == "tests", -lines[file]))[:5]
    for name, count in (*sorted(folders.items()), *((str(file), lines[file]) for file in longest)):
        print(f"{name:36}{count:8,}")


if __name__ == "__main__":
    main()
