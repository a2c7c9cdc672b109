"""A command line whose mistakes end in one line, as in the scripts. No torch."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

from offsphere.names import unknown


class OneLineParser(argparse.ArgumentParser):
    """argparse without its usage block: what was wrong, the nearest name, exit 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line, and end."""
        if found := re.match(r"unrecognized arguments: ([^\s=]+)", message):
            message = self._unknown(found[1])
        elif found := re.match(r"argument ([\w-]+): invalid choice: '(.*)' \(choose from", message):
            choices = self._option_string_actions[found[1]].choices or ()
            message = str(unknown(f"value of {found[1]}", found[2], map(str, choices)))
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"Unexpected {word!r}: settings are flags such as --name=value."
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        return str(unknown("setting", word, flags))
