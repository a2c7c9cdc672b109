"""The prompt probe: closed forms, a slow reference, and its words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from crossmodal import audit_probe
from offsphere.audit.scoring import How
from offsphere.audit.table import Table


@pytest.mark.parametrize(("syntax", "verdict"), [(2.0, "syntax over meaning"), (0.5, "meaning")])
def test_a_probe_with_a_closed_form(syntax, verdict):
    """Nouns and templates are orthogonal, a template weighs `syntax` times a noun."""
    nouns, templates = 12, 4
    axes = torch.eye(nouns + templates, dtype=torch.float64)
    texts = axes[:nouns, None] + syntax * axes[nouns:]
    table = Table()
    audit_probe.measure_probe(texts, How({}, "cosine", 20), table)
    share = syntax**2 / (1 + syntax**2)
    wins = float(syntax > 1)
    want = {
        ("", "nouns"): 6,
        ("", "reference_nouns"): 6,
        ("cosine", "same_template"): share,
        ("cosine", "same_noun"): 1 - share,
        ("cosine", "excess"): 2 * share - 1,
        ("cosine", "nearest_same_template"): wins,
        ("dot", "nearest_same_noun"): 1 - wins,
        ("dot", "nearest_same_noun_minus_cosine"): 0,
        ("chance", "nearest_same_template"): 5 / 23,
        ("chance", "nearest_same_noun"): 3 / 23,
    }
    for key, value in want.items():
        found = audit_probe.found_in(table, *key).value
        assert found == pytest.approx(value, abs=1e-12), key
    assert audit_probe.recommend(table).statements[0].verdict.startswith(verdict)


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
