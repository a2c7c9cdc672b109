"""Planted embeddings with a known answer, slow references, and a real open_clip model."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.metrics import roc_auc_score

from crossmodal import audit, audit_measures, audit_probe, benchmark
from crossmodal.audit import Config
from crossmodal.audit_advice import PROBE, Advice, Statement, headline
from offsphere.evaluation.retrieval import draws

MODEL = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
HOSTILE = "<img src=x onerror=alert(1)>&\"'"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "150")


def directions(rows: int, width: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(
        torch.randn(rows, width, generator=random, dtype=torch.float64)
    )


def planted(folder: Path, name: str = "planted", **tensors: torch.Tensor) -> Config:
    """The settings for an audit of such an embeddings file."""
    file = folder / f"{name}.safetensors"
    save_file({key: x.contiguous() for key, x in tensors.items()}, file)
    return Config(embeddings=str(file), out=str(folder), threads=1, resamples=200)


def audited(folder: Path, **tensors: torch.Tensor) -> audit.Report:
    return audit.measure(planted(folder, **tensors))[0]


def verdicts(report: audit.Report) -> dict[str, list[str]]:
    """Of each direction: on magnitude, on the query's norm, on remedies."""
    return {x.direction: [said.verdict for said in x.statements] for x in report.advice}


def junk_captions(images: int = 300) -> dict[str, torch.Tensor]:
    """Each image has a long caption near to it and a short one that points anywhere."""
    pictures = directions(images, 8, 0)
    good = torch.nn.functional.normalize(pictures + 0.5 * directions(images, 8, 1)) * 3
    junk = directions(images, 8, 2) * 0.3
    owner = torch.arange(images)
    return {
        "images": pictures,
        "texts": torch.cat([good, junk]),
        "owner": torch.cat([owner, owner]),
    }


def noisy_norms(images: int = 300) -> dict[str, torch.Tensor]:
    """Directions that fit, and norms that have nothing to do with anything."""
    pictures = directions(images, 8, 0)
    texts = torch.nn.functional.normalize(pictures + 0.7 * directions(images, 8, 1))
    random = torch.Generator().manual_seed(3)
    norms = torch.randn(2, images, 1, generator=random, dtype=torch.float64).exp()
    return {
        "images": pictures * norms[0],
        "texts": texts * norms[1],
        "owner": torch.arange(images),
    }


def test_magnitude_that_helps(tmp_path):
    tensors = junk_captions()
    report = audited(tmp_path, **tensors)
    found = verdicts(report)
    assert found["image to text"][0] == "use magnitude"
    assert found["text to image"][0] == "already normalised"
    (data,) = report.data
    (to_text, _) = data.directions
    images, texts, owner = (x.numpy() for x in tensors.values())
    for exponent, cells in ((1.0, ("cosine", "dnorm")), (0.0, ("dot", "qnorm"))):
        scores = images @ (texts / np.linalg.norm(texts, axis=1, keepdims=True) ** exponent).T
        row = to_text.with_exponent(exponent)
        right = owner[scores.argmax(1)] == np.arange(300)
        assert row.cells == cells
        assert row.metrics["i2t_r1"].value == pytest.approx(right.mean(), abs=1e-9)
        nearest = np.argsort(-scores, axis=1)[:, :10]
        counts = np.bincount(nearest.ravel(), minlength=600)
        centred = counts - counts.mean()
        skewness = (centred**3).mean() / counts.std() ** 3
        assert row.hubness["skewness"] == pytest.approx(skewness, rel=1e-5)
    gain = to_text.with_exponent(0.0).minus_cosine["i2t_r1"]
    assert gain.value > 0.1
    assert gain.low > 0
    assert f"gains {100 * gain.value:+.1f} points" in report.advice[0].statements[0].text


def test_magnitude_that_hurts(tmp_path):
    found = verdicts(audited(tmp_path, **noisy_norms()))
    assert found["image to text"] == ["keep cosine", "norm does not tell", "no remedy"]
    assert found["text to image"][0] == "keep cosine"


def test_magnitude_that_does_nothing(tmp_path):
    images = directions(400, 64, 0)
    random = torch.Generator().manual_seed(1)
    norms = 1 + 0.05 * torch.rand(400, 1, generator=random, dtype=torch.float64)
    texts = (images + 0.3 * directions(400, 64, 2)) * norms
    report = audited(tmp_path, images=images * norms.flip(0), texts=texts, owner=torch.arange(400))
    for said in verdicts(report).values():
        assert said[0] == "no difference"


def test_at_chance_nothing_can_be_told(tmp_path, capsys):
    """Random directions with norms that vary: dot and cosine differ, and neither knows anything."""
    random = torch.Generator().manual_seed(5)
    norms = torch.randn(2, 400, 1, generator=random, dtype=torch.float64).exp()
    sides = {
        "images": directions(400, 16, 0) * norms[0],
        "texts": directions(400, 16, 1) * norms[1],
    }
    report = audit.run(planted(tmp_path, **sides, owner=torch.arange(400)))
    assert set(map(tuple, verdicts(report).values())) == {("at chance",)}
    (said,) = report.advice[0].statements
    assert "guessing gives 0.3 %" in said.text
    assert report.headline == f"Nothing can be told: {said.text}"
    assert capsys.readouterr().out.startswith("Nothing can be told: i2t_r1 is ")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["keep cosine", "inconclusive"], "Keep normalising: evidence 0"),
        (["use magnitude", "inconclusive"], "Use magnitude for way 0 on set: evidence 0"),
        (["keep cosine", "use magnitude"], "It depends: use magnitude for way 1 on set, keep"),
        (["no difference", "already normalised"], "Keep normalising: evidence 0"),
        (["already normalised"], "Keep normalising: evidence 0"),
        (["at chance", "at chance"], "Nothing can be told: evidence 0"),
        (["at chance", "inconclusive"], "Keep scoring with dot, nothing is settled: evidence 1"),
        (["inconclusive"], "Keep scoring with dot, nothing is settled: evidence 0"),
    ],
)
def test_the_first_line_says_what_to_do(found, words):
    advice = [
        Advice("set", f"way {k}", (Statement(verdict, f"Evidence {k}."),))
        for k, verdict in enumerate(found)
    ]
    probe = Advice(PROBE, "text to text", (Statement("use magnitude", "No."),))
    assert headline([*advice, probe], "dot").startswith(words)


def test_all_right_and_all_wrong_have_intervals(tmp_path):
    """Twenty of twenty: the bootstrap would say 100 % [100, 100]."""
    from statsmodels.stats.proportion import proportion_confint

    images = torch.eye(20, dtype=torch.float64)
    report = audited(tmp_path, images=images, texts=images * 2, owner=torch.arange(20))
    row = report.data[0].directions[0].scored[0]
    low, _ = proportion_confint(20, 20, 0.05, method="wilson")
    share = row.metrics["i2t_r1"]
    assert (share.value, share.low, share.high) == pytest.approx((1.0, low, 1.0))
    change = report.data[0].directions[0].with_exponent(0.0).minus_cosine["i2t_r1"]
    assert (change.value, change.low, change.high) == pytest.approx((0.0, low - 1, 1 - low))


def test_a_model_of_ones_own_has_no_default_data(capsys):
    code, said = refusal(capsys, "--model=ViT-B-32", "--pretrained=weights.pt")
    assert code == 2
    assert "--model needs --data" in said
    assert "csv:FILE" in said


def test_no_sentence_says_no_twice(tmp_path):
    """Every verdict with its sentence, of four audits."""
    nothing = {"images": directions(150, 8, 0), "texts": directions(150, 8, 1)}
    reports = [
        audited(tmp_path, **noisy_norms()),
        audited(tmp_path, **junk_captions(120)),
        audited(tmp_path, **noisy_norms(60)),
        audited(tmp_path, **nothing, owner=torch.arange(150)),
    ]
    no = re.compile(r"\b(?:no|not|none|never|neither|nothing|cannot)\b", re.IGNORECASE)
    for report in reports:
        said = [f"{x.verdict}. {x.text}" for advice in report.advice for x in advice.statements]
        for text in [*said, report.headline]:
            assert len(no.findall(text)) < 2, text


def test_few_images_decide_nothing(tmp_path):
    report = audited(tmp_path, **noisy_norms(images=60))
    assert verdicts(report)["image to text"] == ["inconclusive"] * 3


@pytest.fixture(scope="module")
def direction(tmp_path_factory) -> audit_measures.DirectionAudit:
    report = audited(tmp_path_factory.mktemp("rules"), **noisy_norms(images=12))
    return report.data[0].directions[0]


@pytest.mark.parametrize(
    ("estimate", "images", "verdict"),
    [
        ((0.02, 0.001, 0.04), 1000, "use magnitude"),
        ((-0.02, -0.04, -0.001), 1000, "keep cosine"),
        ((0.02, 0.0, 0.04), 1000, "inconclusive"),
        ((0.0, -0.009, 0.009), 1000, "no difference"),
        ((0.005, 0.001, 0.009), 1000, "no difference"),
        ((0.0, 0.0, 0.0), 299, "inconclusive"),
        ((0.0, 0.0, 0.0), 300, "no difference"),
        ((0.5, 0.4, 0.6), 99, "inconclusive"),
    ],
)
def test_the_rules_of_magnitude(direction, estimate, images, verdict):
    scored = tuple(
        dataclasses.replace(row, minus_cosine={"i2t_r1": audit_measures.Estimate(*estimate)})
        for row in direction.scored
    )
    found = dataclasses.replace(direction, scored=scored, images=images)
    assert audit.recommend(found)[0].verdict == verdict
    constant = dataclasses.replace(found, candidate_cv=0.0005)
    assert audit.recommend(constant)[0].verdict == "already normalised"


def test_norms_of_right_and_wrong_answers(tmp_path):
    """Long images are those with little noise: their norm tells, whatever it ranks."""
    texts = directions(300, 8, 0)
    random = torch.Generator().manual_seed(1)
    noise = torch.rand(300, 1, generator=random, dtype=torch.float64)
    images = torch.nn.functional.normalize(texts + 1.2 * noise * directions(300, 8, 2))
    images = images * (2 - noise)
    report = audited(tmp_path, images=images, texts=texts, owner=torch.arange(300))
    assert verdicts(report)["image to text"][:2] == ["already normalised", "norm tells"]
    told = report.data[0].directions[0].confidence
    right = ((images @ texts.T).argmax(1) == torch.arange(300)).numpy()
    norms = images.norm(dim=1).numpy()
    assert (told.right, told.wrong, told.undecided) == (right.sum(), (~right).sum(), 0)
    assert told.answer_norm is None  # all texts are of one length
    assert told.query_norm.auroc.value == pytest.approx(roc_auc_score(right, norms), abs=1e-9)
    assert told.query_norm.cohens_d.value == pytest.approx(cohens_d(norms, right), abs=1e-9)
    (rows,) = draws(300, 200, 0)
    areas = [roc_auc_score(right[row], norms[row]) for row in rows.numpy()]
    effects = [cohens_d(norms[row], right[row]) for row in rows.numpy()]
    for estimate, values in (
        (told.query_norm.auroc, areas),
        (told.query_norm.cohens_d, effects),
    ):
        want = np.quantile(values, [0.025, 0.975])
        assert [estimate.low, estimate.high] == pytest.approx(want, abs=1e-9)
    shortest = np.argsort(norms)[:30]
    assert told.mean_norm[0] == pytest.approx(norms[shortest].mean())
    assert told.share_right[0] == pytest.approx(right[shortest].mean())


def cohens_d(values: np.ndarray, right: np.ndarray) -> float:
    a, b = values[right], values[~right]
    pooled = ((len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)) / (len(values) - 2)
    return (a.mean() - b.mean()) / np.sqrt(pooled)


def test_captions_are_drawn_with_their_image():
    image = torch.tensor([0, 0, 3, 3, 3, 7])
    values = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    found = audit_measures.clustered_mean(values, image, 0.8, resamples=50, seed=2)
    groups = [values[image == name].numpy() for name in (0, 3, 7)]
    (rows,) = draws(3, 50, 2)
    means = [np.concatenate([groups[i] for i in row]).mean() for row in rows.tolist()]
    assert found.value == pytest.approx(0.5)
    assert [found.low, found.high] == pytest.approx(np.quantile(means, [0.1, 0.9]), abs=1e-9)
    weights = list(audit_measures.image_weights(image, 50, 2))
    for row, weight in zip(rows.tolist(), weights, strict=True):
        assert weight.tolist() == [row.count(place) for place in (0, 0, 1, 1, 1, 2)]


def test_remedies_are_fitted_on_one_half_and_judged_on_the_other(tmp_path):
    """Each side has a mean of its own, which cosine trips over."""
    base = directions(400, 16, 0)
    offsets = 4 * directions(2, 16, 1)
    images = base + offsets[0]
    texts = base + 0.7 * directions(400, 16, 2) + offsets[1]
    report = audited(tmp_path, images=images, texts=texts, owner=torch.arange(400))
    assert verdicts(report)["image to text"][2] == "use a remedy"
    found = report.data[0].directions[0].remedies
    assert (found.reference, found.judged) == (200, 200)
    assert found.level == pytest.approx(0.99)
    rows = {row.name: row for row in found.rows}

    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    fitted, kept = order[:200].numpy(), np.sort(order[200:].numpy())
    left, right = images.numpy(), texts.numpy()

    def hits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        cosine = (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (
            b / np.linalg.norm(b, axis=1, keepdims=True)
        ).T
        return cosine.argmax(1) == np.arange(len(a))

    plain = hits(left[kept], right[kept])
    centred = hits(left[kept] - left[fitted].mean(0), right[kept] - right[fitted].mean(0))
    assert rows["cosine"].recall == pytest.approx(plain.mean())
    assert rows["centred"].recall == pytest.approx(centred.mean())
    assert centred.mean() > plain.mean() + 0.1
    surplus = centred.astype(float) - plain
    (drawn,) = draws(200, 200, 0)
    want = np.quantile(surplus[drawn.numpy()].mean(1), [0.005, 0.995])
    gain = rows["centred"].minus_cosine
    assert [gain.value, gain.low, gain.high] == pytest.approx([surplus.mean(), *want], abs=1e-9)
    assert rows["centred"].hubness["skewness"] < rows["cosine"].hubness["skewness"]
    zscored = rows["z-scored queries"]
    assert zscored.minus_cosine is None
    assert zscored.recall == rows["cosine"].recall
    assert zscored.hubness == rows["cosine"].hubness


def test_equal_scores_count_their_share():
    items = torch.eye(3, dtype=torch.float64)[[0, 0, 1]]
    search = audit_measures.Search(
        queries=torch.eye(3, dtype=torch.float64)[:2],
        items=items,
        query_key=torch.tensor([0, 1]),
        item_key=torch.tensor([0, 1, 1]),
        query_image=torch.arange(2),
        item_image=torch.arange(3),
    )
    judged = audit_measures.judge(audit_measures.CellSimilarity(), search)
    assert judged.hit.tolist() == [0.5, 1.0]
    assert judged.top_score.tolist() == [1.0, 1.0]


def test_named_similarities_in_the_benchmark_and_in_the_audit(tmp_path, capsys):
    """Fitted on one half of the images and judged on the other, written out for centring."""
    names = ("centred", "dot", "dnorm", "query_zscore", "csls")
    tensors = junk_captions(60)
    tensors["texts"] += 0.5
    config = dataclasses.replace(planted(tmp_path, **tensors), similarities=names)
    kept = {f.name: getattr(config, f.name) for f in dataclasses.fields(benchmark.Config)}
    benchmark.run(benchmark.Config(**kept))
    assert "Post-hoc similarities" in capsys.readouterr().out
    (file,) = tmp_path.glob("benchmark/*/similarities.csv")
    with file.open() as text:
        table = list(csv.DictReader(text))
    rows = {row["similarity"]: row for row in table if row["query"] == "image"}
    assert list(rows) == ["cosine", *names]
    fitted = audit_measures.reference_half(60, config.seed).numpy()
    images, texts, owner = (x.numpy() for x in tensors.values())
    judged = ~fitted[owner]
    queries = images[~fitted] - images[fitted].mean(0)
    items = texts[judged] - texts[~judged].mean(0)
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    right = owner[judged][(queries @ items.T).argmax(1)] == np.flatnonzero(~fitted)
    assert float(rows["centred"]["value"]) == pytest.approx(right.mean())
    gain = float(rows["centred"]["value"]) - float(rows["cosine"]["value"])
    assert float(rows["centred"]["minus_cosine"]) == pytest.approx(gain)
    for name in ("dnorm", "query_zscore"):  # they rank as cosine does
        assert rows[name]["value"] == rows["cosine"]["value"]
        assert rows[name]["minus_cosine"] == ""
    assert float(rows["dot"]["level"]) == pytest.approx(1 - 0.05 / 3)
    assert (rows["dot"]["fitted_on_images"], rows["dot"]["judged_on_images"]) == ("30", "30")
    report = audit.measure(config)[0]
    found = {row.name: row.recall for row in report.data[0].directions[0].remedies.rows}
    assert found == {name: pytest.approx(float(row["value"])) for name, row in rows.items()}
    with pytest.raises(ValueError, match="Did you mean 'centred'"):
        benchmark.Config(embeddings="x", similarities=("centered",))


def test_a_remedy_that_cannot_be_fitted_is_a_row(tmp_path):
    """All texts of all images are one and the same: there is nothing to centre or whiten."""
    images, texts = torch.ones(12, 4), torch.ones(12, 4)
    report = audited(tmp_path, images=images, texts=texts, owner=torch.arange(12))
    rows = {row.name: row for row in report.data[0].directions[0].remedies.rows}
    assert "do not vary" in rows["whitened"].problem
    assert rows["cosine"].recall == pytest.approx(1 / 6)


def test_classes_have_one_direction(tmp_path):
    """Three templates per class; the class with the long texts takes what it should not."""
    classes, images = 5, 200
    means = directions(classes, 6, 0)
    labels = torch.arange(images) % classes
    pictures = means[labels] + 0.8 * directions(images, 6, 1)
    texts = means.repeat_interleave(3, 0) + 0.1 * directions(3 * classes, 6, 2)
    texts[:3] *= 4
    report = audited(
        tmp_path,
        images=pictures,
        labels=labels,
        class_texts=texts,
        class_owner=torch.arange(classes).repeat_interleave(3),
    )
    assert verdicts(report).keys() == {"image to class"}
    assert verdicts(report)["image to class"][0] == "keep cosine"
    (found,) = report.data[0].directions
    unit = torch.nn.functional.normalize
    vectors = unit(unit(texts).view(classes, 3, 6).mean(1))
    norms = texts.norm(dim=1).view(classes, 3).mean(1)
    for exponent, items in ((1.0, vectors), (0.0, vectors * norms[:, None])):
        chosen = (pictures @ items.T).argmax(1)
        row = found.with_exponent(exponent)
        accuracy = (chosen == labels).double().mean().item()
        assert row.metrics["top1"].value == pytest.approx(accuracy)
        counts = torch.bincount(chosen, minlength=classes).double()
        share = (counts.max() / images).item()
        assert row.hubness["largest_hub_share"] == pytest.approx(share)
    assert found.neighbours == 1
    right = (pictures @ vectors.T).argmax(1) == labels
    assert (found.confidence.right, found.candidates) == (int(right.sum()), "class")


@pytest.mark.parametrize(("syntax", "verdict"), [(2.0, "syntax over meaning"), (0.5, "meaning")])
def test_a_probe_with_a_closed_form(syntax, verdict):
    """Nouns and templates are orthogonal, a template weighs `syntax` times a noun."""
    nouns, templates = 12, 4
    axes = torch.eye(nouns + templates, dtype=torch.float64)
    texts = axes[:nouns, None] + syntax * axes[nouns:]
    found = audit_probe.measure(texts, 20, 0)
    share = syntax**2 / (1 + syntax**2)
    assert (found.nouns, found.reference_nouns) == (6, 6)
    assert found.same_template.value == pytest.approx(share)
    assert found.same_noun.value == pytest.approx(1 - share)
    assert found.excess.value == pytest.approx(2 * share - 1)
    wins = float(syntax > 1)
    assert found.nearest["cosine"].same_template.value == pytest.approx(wins)
    assert found.nearest["dot"].same_noun.value == pytest.approx(1 - wins)
    assert found.nearest["dot"].same_noun_minus_cosine.value == pytest.approx(0)
    assert found.chance_same_template == pytest.approx(5 / 23)
    assert found.chance_same_noun == pytest.approx(3 / 23)
    assert audit.recommend_from_probe(found)[0].verdict.startswith(verdict)


def test_the_probe_has_the_numbers_of_a_slow_reference():
    random = torch.Generator().manual_seed(5)
    texts = torch.randn(7, 3, 4, generator=random, dtype=torch.float64)
    same_template, same_noun = audit_probe.mean_cosines(texts)
    unit = torch.nn.functional.normalize(texts, dim=-1).numpy()
    for n in range(7):
        others = [unit[n, t] @ unit[m, t] for t in range(3) for m in range(7) if m != n]
        itself = [unit[n, t] @ unit[n, s] for t in range(3) for s in range(3) if s != t]
        assert same_template[n].item() == pytest.approx(np.mean(others))
        assert same_noun[n].item() == pytest.approx(np.mean(itself))
    by_template, by_noun = audit_probe.nearest_shares(torch.from_numpy(unit), texts)
    raw = texts.numpy()
    for n in range(7):
        kinds = []
        for t in range(3):
            scores = {
                (m, s): unit[n, t] @ raw[m, s]
                for m in range(7)
                for s in range(3)
                if (m, s) != (n, t)
            }
            m, s = max(scores, key=scores.get)
            kinds.append((s == t, m == n))
        want = np.mean(kinds, axis=0)
        assert [by_template[n].item(), by_noun[n].item()] == pytest.approx(want)


def test_the_probes_words_fit_their_templates():
    nouns = audit_probe.NOUNS.read_text().split("\n")[:-1]
    assert len(nouns) == len(set(nouns)) == 80
    assert all(noun.isalpha() and noun[0] not in "aeiou" for noun in nouns)  # "a {c}"


class Page(HTMLParser):
    """Tags that are open, addresses that a browser would fetch, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.fetched, self.tags, self.labels, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        for name in ("src", "href", "xlink:href", "data"):
            if not named.get(name, "#").startswith("#"):
                self.fetched.append(named[name])
        if tag == "svg":
            self.labels.append(named.get("aria-label"))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else_and_escapes_names(tmp_path):
    report = audit.run(planted(tmp_path, HOSTILE, **junk_captions(images=120)))
    (file,) = tmp_path.glob("audit/*/audit.html")
    text = file.read_text()
    found = Page(text)
    assert found.open == []
    assert found.fetched == []
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert "@import" not in text
    assert "url(http" not in text
    assert HOSTILE in found.text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "#012345" not in text  # every line of a plot has the page's own colour
    assert len(found.labels) == 5
    assert all(found.labels)
    gain = report.data[0].directions[0].with_exponent(0.0).minus_cosine["i2t_r1"]
    assert f"dot = qnorm {100 * gain.value:+.1f} points" in found.labels[3]
    for advice in report.advice:
        for said in advice.statements:
            assert said.text in found.text


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """open_clip towers with random weights, and 24 pictures with one or two captions."""
    import open_clip

    folder = tmp_path_factory.mktemp("audit")
    (folder / "audit-tiny.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(folder / "audit-tiny.json")
    torch.manual_seed(0)
    towers = open_clip.create_model("audit-tiny")
    torch.save(towers.state_dict(), folder / "weights.pt")
    random = np.random.default_rng(0)
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "caption"])
        for k in range(24):
            pixels = random.integers(0, 256, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
            table.writerows([[f"{k}.png", f"picture {k} take {j}"] for j in range(1 + k % 2)])
    return folder


def test_a_real_model_from_flags_to_page(model, tmp_path, capsys):
    import open_clip

    flags = [f"--model={model / 'audit-tiny.json'}", f"--pretrained={model / 'weights.pt'}"]
    flags += [f"--data=csv:{model / 'pairs.csv'}", f"--out={tmp_path}", "--device=cpu"]
    flags += ["--threads=1", "--resamples=20", "--save-embeddings"]
    audit.main(flags)
    (folder,) = tmp_path.glob("audit/*")
    assert str(folder) in capsys.readouterr().out.replace("\n", "")
    content = json.loads((folder / "audit.json").read_text())
    (data,) = content["data"]
    assert (data["images"], data["texts"], content["own"]) == (24, 36, "cosine")
    said = [statement["verdict"] for statement in content["advice"][0]["statements"]]
    assert said == ["at chance"]  # towers of random weights
    assert content["headline"].startswith("Nothing can be told: ")
    assert Page((folder / "audit.html").read_text()).open == []

    towers = open_clip.create_model("audit-tiny", str(model / "weights.pt")).eval()
    tokenize = open_clip.get_tokenizer("audit-tiny")
    nouns = audit_probe.NOUNS.read_text().split()
    lines = audit_probe.TEMPLATES.read_text().splitlines()
    texts = [line.format(c=noun) for noun in nouns for line in lines]
    with torch.no_grad():
        raw = towers.encode_text(tokenize(texts)).double().view(len(nouns), len(lines), -1)
    judged = raw[~audit_measures.reference_half(len(nouns), 0)]
    cosines = audit_probe.mean_cosines(judged)[0].mean().item()
    assert content["probe"]["same_template"]["value"] == pytest.approx(cosines, abs=1e-5)

    (saved,) = folder.glob("embeddings-*.safetensors")
    again = audit.run(Config(embeddings=str(saved), out=str(tmp_path), threads=1, resamples=20))
    norms = again.data[0].sides["text"].norms
    assert norms["cv"] == pytest.approx(data["sides"]["text"]["norms"]["cv"], rel=1e-6)
    assert again.probe is None


def refusal(capsys, *flags: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        audit.main(flags)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return end.value.code, said


def test_mistakes_end_in_one_line(tmp_path, capsys):
    code, said = refusal(capsys)
    assert code == 2
    assert "one of --run=FOLDER, --model=NAME and --embeddings=FILE" in said
    code, said = refusal(capsys, f"--embeddings={tmp_path / 'no.npz'}")
    assert code == 1
    assert said.startswith("offsphere audit: error: ")
    file = tmp_path / "three.safetensors"
    sides = {"images": torch.eye(3), "texts": torch.eye(3), "owner": torch.arange(3)}
    save_file(sides, file)
    code, said = refusal(capsys, f"--embeddings={file}", f"--out={tmp_path}")
    assert code == 1
    assert "three has 3 images: at least 4 are needed" in said
    assert not (tmp_path / "audit").exists()


def test_help_needs_no_torch():
    code = "import crossmodal.audit, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
