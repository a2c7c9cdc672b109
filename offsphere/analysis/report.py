"""`offsphere report [STUDY]`: one web page of all studies, or of one, with figures and tables.

    offsphere report                          every study below results/, as results/report.html
    offsphere report results/my_study         one study, as results/my_study/report.html

The page is one file that works offline; `figures/` (PDF, PNG, SVG) and `tables/` (CSV, Markdown,
LaTeX) are written next to it. The page of one study holds nothing but that study: figures of
papers and claims about them come with --published. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from offsphere.analysis.charts import write_figures
from offsphere.analysis.claim_file import Claim, load_claims
from offsphere.analysis.claims import Verdict, evaluate_claims
from offsphere.analysis.digest import compare_with_cosine, read_study
from offsphere.analysis.over_collections import collection_plates
from offsphere.analysis.overview import overviews as overviews_of
from offsphere.analysis.overview import write_overview
from offsphere.analysis.page import NOTHING, Withdrawn, render
from offsphere.analysis.paper_tables import check_metrics, write_tables
from offsphere.analysis.tables import RUNS, StudyTables, run_folders
from offsphere.run import safe_yaml
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse
from offsphere.run.files import write_whole
from offsphere.run.progress import speaking, track
from offsphere.share import CONFIGS

PAGE = "report.html"
WITHDRAWN = "withdrawn.yaml"
CLAIMS = CONFIGS / "claims.yaml"


@dataclass(frozen=True)
class ReportSettings:
    studies: tuple[str, ...] = ()
    """STUDY, a study's folder; its page is written there. The flag may be left out."""
    results: str = "results"
    """Where the studies are."""
    out: str | None = None
    """The page, or the folder for report.html; default: the study's folder, or --results."""
    claims: str | None = None
    """The file of claims; default: configs/claims.yaml."""
    date: str | None = None
    """The date on the page; default: today."""
    metrics: str = ""
    """The metrics of the tables, with commas between: test/probe,test/knn; default: the study's."""
    published: bool = False
    """Put claims and figures of papers on the page of a study too."""
    figures: bool = True
    """Only the page and the tables."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page; a mistake ends in one line, exit 1 (exit 2 for a faulty flag)."""
    settings = parse(
        ReportSettings,
        argv,
        description=__doc__,
        name="offsphere report",
        words=("studies", "STUDY"),
    )
    with one_line_errors("offsphere report", "No page was written."), speaking():
        out = write_report(
            settings.studies,
            results=settings.results,
            out=settings.out,
            claims=settings.claims,
            date=settings.date,
            figures=settings.figures,
            metrics=[name.strip() for name in settings.metrics.split(",") if name.strip()],
            published=settings.published or None,
        )
        print(f"{out} ({out.stat().st_size / 1e6:.2f} MB)")


def write_report(
    studies: Sequence[str | Path] = (),
    *,
    results: str | Path = "results",
    out: str | Path | None = None,
    claims: str | Path | None = None,
    date: str | None = None,
    figures: bool = True,
    metrics: Sequence[str] = (),
    published: bool | None = None,
) -> Path:
    """Write the page of these study folders (all below `results` if none), figures and tables.

    One named study has its page in its own folder. What papers printed stands beside the studies
    unless they are named, or if it is asked for. `metrics` are those of the tables.
    """
    if len(studies) > 1 and out is None:
        raise ValueError("Several studies are named: --out=FILE.html says where their page goes.")
    own = len(studies) == 1
    folders = [study_folder(study) for study in studies] or find_studies(results)
    root = folders[0].parent if studies else Path(results)
    page = (folders[0] if own else root) / PAGE if out is None else Path(out)
    page = page / PAGE if page.is_dir() else page
    published = not studies if published is None else published
    fixed = load_claims(claims or CLAIMS) if claims or (published and CLAIMS.exists()) else []
    tables = [StudyTables(folder) for folder in folders]
    found = [
        read_study(study, [*metrics, *_claimed(fixed, study.folder.name)], published=published)
        for study in track(tables, len(tables), "Reading", "studies")
    ]
    check_metrics(found, metrics)
    withdrawn = NOTHING if studies else _withdrawn(root / WITHDRAWN)
    standing = [study for study in found if study.name not in withdrawn.studies]
    comparisons = compare_with_cosine(standing, published=published)
    date = date or datetime.now(UTC).date().isoformat()
    lines = _board(fixed, root, tables, {study.name for study in found} if studies else None)
    overviews = overviews_of(lines, comparisons) | collection_plates(tables)
    text = render(found, comparisons, lines, overviews, date=date, withdrawn=withdrawn, own=own)
    page.parent.mkdir(parents=True, exist_ok=True)
    written, drawn = page.parent / "tables", page.parent / "figures"
    for study in found:
        write_tables(study, written if page.parent in folders else written / study.name, metrics)
    if figures:
        for study in standing:
            write_figures(study, drawn if page.parent in folders else drawn / study.name)
        if not own:
            write_overview(overviews, lines, drawn)
    write_whole(page, text)
    return page


def _withdrawn(file: Path) -> Withdrawn:
    """The studies that a folder of results names as withdrawn, if it has such a file."""
    if not file.exists():
        return NOTHING
    found = safe_yaml.load(file.read_text(encoding="utf-8"), file)
    if not (isinstance(found, dict) and isinstance(found.get("studies"), list)):
        raise ValueError(f"{file} must have `studies`, a list of names, and `reason`.")
    return Withdrawn([str(name) for name in found["studies"]], str(found.get("reason", "")))


def study_folder(study: str | Path) -> Path:
    """The results folder of a study; its file in configs/studies is not that."""
    folder = Path(study)
    if folder.is_file():
        raise ValueError(
            f"{study} is a file: expected the folder with a study's runs, such as "
            f"results/{folder.stem}."
        )
    return folder if folder.name not in ("", "..") else folder.resolve()


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


def _board(
    claims: Sequence[Claim],
    root: Path,
    tables: Sequence[StudyTables],
    about: Collection[str] | None,
) -> list[Verdict]:
    """The verdicts on claims, all of them or those about some studies; one family in any case."""
    if about is not None and not any(claim.study in about for claim in claims):
        return []
    lines = evaluate_claims(claims, root, tables) if claims else []
    return [line for line in lines if about is None or line.claim.study in about]


def _claimed(claims: Sequence[Claim], study: str) -> list[str]:
    """The metrics that claims about a study rest on."""
    about = [claim.metric for claim in claims if claim.study == study and claim.metric]
    return list(dict.fromkeys(part.strip() for metric in about for part in metric.split(" - ")))


if __name__ == "__main__":
    main()
