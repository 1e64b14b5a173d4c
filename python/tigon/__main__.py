"""``python -m tigon env`` prints the environment; ``python -m tigon doctor`` checks the installation."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tigon",
        description="env: print versions, devices and what the library was built with. doctor: run every "
        "operation, forward and backward, and compare it with its formula. In Python: help(tigon).",
    )
    parser.add_argument("command", nargs="?", choices=("env", "doctor"))
    command = parser.parse_args(arguments).command
    if command is None:
        parser.print_help()
        return 0
    if command == "env":
        from tigon.environment import env

        print(env())
        return 0
    from tigon.doctor import main as doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
