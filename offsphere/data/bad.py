"""Samples that cannot be used: the first one is an error, or all are left out and counted."""

from __future__ import annotations

from collections.abc import Sequence

from offsphere.names import unknown

ON_BAD_SAMPLE = ("error", "skip")
# What a user can do about it, by what is wrong.
LEAVE_OUT = "(--on-bad-sample=skip leaves such samples out.)"
LEAVE_IT_OUT = "(--on-bad-sample=skip leaves it out.)"
GO_ON = "(--on-bad-sample=skip goes on without it.)"
READ_REST = "(--on-bad-sample=skip reads what can be read of it.)"


class BadSamples:
    """Stops at the first bad sample, or collects them, as the user asked."""

    def __init__(self, on_bad_sample: str) -> None:
        if on_bad_sample not in ON_BAD_SAMPLE:
            raise unknown("value of on_bad_sample", on_bad_sample, ON_BAD_SAMPLE)
        self.skip = on_bad_sample == "skip"
        self.messages: dict[str, int] = {}
        """What was wrong, and how many samples each of these cost."""

    @property
    def count(self) -> int:
        """How many samples were left out."""
        return sum(self.messages.values())

    def add(self, message: str, remedy: str = LEAVE_OUT, *, samples: int = 1) -> None:
        """Report one bad sample, or what else is wrong, what can be done, and what it costs."""
        if not self.skip:
            raise ValueError(f"{message} {remedy}")
        self.messages[message] = self.messages.get(message, 0) + samples

    def add_ids(self, file: object, what: str, ids: Sequence[str]) -> None:
        """Report all samples of a file that have the same fault, if there are any."""
        if ids and not self.skip:
            raise ValueError(
                f"{file}: {len(ids)} {what} ({first_few(ids)}). Mend the file, or leave them out "
                "with --on-bad-sample=skip."
            )
        for each in ids:
            self.add(f"{file}: {what} ({each!r})")


def check_unique(source: object, ids: Sequence[str]) -> None:
    """Refuse ids that come more than once."""
    seen: set[str] = set()
    twice = [i for i in ids if i in seen or seen.add(i)]
    if twice:
        said = f"{len(twice)} ids come more than once ({first_few(twice)})"
        raise ValueError(f"{source}: {said}: ids must be unique.")


def first_few(ids: Sequence[str]) -> str:
    """The first three of some names, for a message."""
    return ", ".join(map(repr, ids[:3])) + (", ..." if len(ids) > 3 else "")
