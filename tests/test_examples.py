"""The examples run as they stand, and are as short as they promise."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_simclr_on_one_page_learns_more_than_the_largest_group(scripts):
    run = scripts.run("simclr_one_page")
    assert run.wait() == 0, run.stderr
    first, last = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+)", run.stdout)[0])
    accuracy, majority = map(float, re.findall(r"([\d.]+)%", run.stdout))
    assert last < 0.8 * first
    assert accuracy > majority + 2
    assert len((EXAMPLES / "simclr_one_page.py").read_text().splitlines()) <= 80
