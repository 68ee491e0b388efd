"""``python -m tests.bench [--only NAME]``."""

from __future__ import annotations

import argparse

from tests.bench.harness import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Ratios against references.")
    parser.add_argument("--only", metavar="NAME", help="run this benchmark alone")
    run(parser.parse_args().only)


if __name__ == "__main__":
    main()
