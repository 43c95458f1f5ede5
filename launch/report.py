"""Show the records of several `longdraft bench --out` on one page: `longdraft report RUN... --out report.html`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from longdraft.launch.console import leave, run_command, show


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft report", description="Show the records of benches side by side.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders that `longdraft bench --out` wrote")
    help = "a page (.html) or a picture of the speeds (.svg); default: report.html"
    add("--out", type=Path, default=Path("report.html"), help=help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = _parser()

    def work() -> None:
        args = parser.parse_args(argv)
        write_report(args.runs, args.out, "--out")
        show(f"Written to {args.out}\n")

    return run_command(parser.prog, work)


def check_name(path: Path, option: str) -> None:
    """Raise ValueError for a file name that is neither a page's nor a picture's."""
    if path.suffix not in (".html", ".svg"):
        raise ValueError(f"{option}: {path} is neither a page nor a picture; give a name that ends in .html or .svg")


def write_report(runs: Sequence[Path], path: Path, option: str) -> None:
    """Write the page or the picture of these records. Raises ValueError, which names `option` if `path` is wrong."""
    check_name(path, option)
    # Imported here so that --help need not wait for torch.
    from longdraft.benchmarks.drafters.html_report import page, picture
    from longdraft.benchmarks.drafters.record import read_record
    from longdraft.models.files import write_atomically

    names = [run.resolve().name for run in runs]
    titles = [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]
    records = {title: read_record(run) for title, run in zip(titles, runs, strict=True)}
    text = (page if path.suffix == ".html" else picture)(records)
    try:
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; give another path") from error


if __name__ == "__main__":
    leave(main())
