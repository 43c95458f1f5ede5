"""Records of `longdraft bench --out` on one page: `longdraft report RUN... --out report.html`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from longdraft.launch.console import framed, leave, show


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft report", description="Benchmarks' records, side by side.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders that `longdraft bench --out` wrote")
    add("--out", type=Path, default=Path("report.html"), help="a page (.html), or a picture of the speeds (.svg)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = _parser()

    def work() -> None:
        args = parser.parse_args(argv)
        write_report(args.runs, args.out, "--out")
        show(f"Written to {args.out}\n")

    return framed(parser.prog, work)


def check_name(path: Path, option: str) -> None:
    """Raise ValueError for a file that is neither a page nor a picture."""
    if path.suffix not in (".html", ".svg"):
        raise ValueError(f"{option}: {path} is neither a page nor a picture; give a name that ends in .html or .svg")


def write_report(runs: Sequence[Path], path: Path, option: str) -> None:
    """The page or the picture of these records. Raises: ValueError for a record or a path that is none."""
    check_name(path, option)
    # Here, not above: --help should not wait for torch.
    from longdraft.benchmarks.answers import read_record
    from longdraft.benchmarks.html_report import page, picture
    from longdraft.models.files import write_atomically

    names = [run.resolve().name for run in runs]
    called = {name if names.count(name) == 1 else str(run): run for name, run in zip(names, runs, strict=True)}
    records = {name: read_record(run) for name, run in called.items()}
    text = (page if path.suffix == ".html" else picture)(records)
    try:
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; give another path") from error


if __name__ == "__main__":
    leave(main())
