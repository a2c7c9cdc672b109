"""`offsphere report [STUDY ...]`: one web page of all studies, with figures and tables beside it.

    offsphere report                          every study below results/
    offsphere report results/small_batch      one study

The page is one file that works offline; `figures/` (PNG, SVG) and `tables/` (CSV, Markdown, LaTeX)
are written next to it. No torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.analysis.claim_file import Claim, load_claims
from offsphere.analysis.claims import evaluate_claims
from offsphere.analysis.digest import Study, compare_with_cosine, read_study
from offsphere.analysis.panels import Panel, file_name, steps_text
from offsphere.analysis.tables import RUNS, export, run_folders
from offsphere.record import atomic_write
from offsphere.share import CONFIGS

if TYPE_CHECKING:
    import pandas as pd

PAGE = "report.html"
CLAIMS = CONFIGS / "claims.yaml"
FORMS = {"csv": "csv", "markdown": "md", "latex": "tex"}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page; a mistake ends in one line, exit 1 (exit 2 for a faulty flag)."""
    args = _parser().parse_args(argv)
    try:
        out = write_report(
            args.studies,
            results=args.results,
            out=args.out,
            claims=args.claims,
            date=args.date,
            figures=not args.no_figures,
        )
    except (ValueError, OSError) as error:
        print(f"offsphere report: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"{out} ({out.stat().st_size / 1e6:.2f} MB)")


def write_report(
    studies: Sequence[str | Path] = (),
    *,
    results: str | Path = "results",
    out: str | Path | None = None,
    claims: str | Path | None = None,
    date: str | None = None,
    figures: bool = True,
) -> Path:
    """Write the page of these study folders (all below `results` if none), figures and tables.

    Without `claims` they are the repository's; an installed package without them has no board.
    """
    from offsphere.analysis.page import render

    folders = [Path(study) for study in studies] or find_studies(results)
    root = folders[0].parent if studies else Path(results)
    page = Path(out) if out is not None else root / PAGE
    fixed = load_claims(claims or CLAIMS) if claims or CLAIMS.exists() else []
    found = [read_study(folder, _claimed(fixed, folder.name)) for folder in folders]
    comparisons = compare_with_cosine(found)
    text = render(
        found,
        comparisons,
        evaluate_claims(fixed, root) if fixed else [],
        date=date or datetime.now(UTC).date().isoformat(),
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    for study in found:
        write_tables(study, page.parent / "tables" / study.name)
    if figures:
        from offsphere.analysis.figures import write_figures
        from offsphere.analysis.overview import write_overview

        for study in found:
            write_figures(study, page.parent / "figures" / study.name)
        write_overview(found, comparisons, page.parent / "figures")
    atomic_write(page, lambda file: file.write(text.encode()))
    return page


def find_studies(results: str | Path) -> list[Path]:
    """The folders below `results` that hold runs or a table of runs, by name."""
    folders = sorted(path for path in Path(results).glob("*") if path.is_dir())
    found = [path for path in folders if (path / RUNS).exists() or run_folders(path)]
    if not found:
        raise ValueError(
            f"{results} holds no study: run one (offsphere study configs/studies/small_batch.yaml "
            "--smoke), or name a study's folder."
        )
    return found


def write_tables(study: Study, folder: Path) -> None:
    """The results of each part for the study's metric, as CSV, Markdown and LaTeX."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, panel in enumerate(study.panels):
        table = results_table(panel)
        for form, suffix in FORMS.items():
            text = export(table, form)  # pyright: ignore[reportArgumentType]
            path = folder / f"{file_name(panel, place)}.{suffix}"
            atomic_write(path, lambda file, text=text: file.write(text.encode()))


def results_table(panel: Panel) -> pd.DataFrame:
    """One row per metric and condition: mean, interval, seeds, paired difference, effect size."""
    import pandas as pd

    rows = []
    names = [panel.primary] if panel.treatment else panel.metrics
    for name in names:
        if name is None:
            continue
        metric = panel.metrics[name]
        for place, condition in enumerate(panel.conditions):
            found, difference = metric.summary[place], metric.difference[place]
            rows.append(
                {
                    "setting": panel.contexts[condition.context],
                    panel.treatment or "runs": panel.levels[condition.level],
                    "metric": name,
                    "mean": found.mean,
                    "low": found.low,
                    "high": found.high,
                    "seeds": found.n,
                    "steps": steps_text(panel.steps[place]).removesuffix(" steps"),
                    "missing": metric.missing[place],
                    "difference": difference.mean if difference else None,
                    "difference low": difference.low if difference else None,
                    "difference high": difference.high if difference else None,
                    "effect size": metric.effect_size[place],
                }
            )
    return pd.DataFrame(rows)


def _claimed(claims: Sequence[Claim], study: str) -> list[str]:
    """The metrics that claims about a study rest on."""
    about = [claim.metric for claim in claims if claim.study == study and claim.metric]
    return list(dict.fromkeys(part.strip() for metric in about for part in metric.split(" - ")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offsphere report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="a study's folder")
    parser.add_argument("--results", default="results", help="where the studies are")
    parser.add_argument("--out", help="the page; default: report.html beside the studies")
    parser.add_argument("--claims", help="the file of claims; default: configs/claims.yaml")
    parser.add_argument("--date", help="the date on the page; default: today")
    parser.add_argument("--no-figures", action="store_true", help="only the page and the tables")
    return parser


if __name__ == "__main__":
    main()
