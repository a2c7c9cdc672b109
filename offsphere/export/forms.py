"""How a lane answers `offsphere export`: one of the forms that its runs can take, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from offsphere.run.scripts import Export


def write_form(asked: Export, forms: Mapping[str, Callable[[Export], str]], what: str) -> str:
    """Let the form that is asked for be written; `auto` is the first. `what` is a kind of run."""
    form = next(iter(forms)) if asked.form == "auto" else asked.form
    if form not in forms:
        raise ValueError(
            f"{asked.run} is {what}, which --as={form} cannot hold: expected one of "
            f"{', '.join(forms)}."
        )
    if asked.as_cosine and form != "open_clip":
        raise ValueError(f"--as-cosine is for --as=open_clip: {form} keeps the run's own cell.")
    return forms[form](asked)


def check_packages(form: str, *names: str) -> None:
    """Refuse a form whose packages are not installed."""
    missing = [name.replace("_", "-") for name in names if find_spec(name) is None]
    if missing:
        raise ValueError(f"--as={form} needs {' and '.join(missing)}: pip install -e '.[interop]'.")
