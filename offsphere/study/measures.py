"""What each script measures, so that a study's `metric` can be checked before its first run.

Names are patterns: * stands for a collection, a kind of class or a number. Tests hold this list
against the committed tables and against real runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from offsphere.names import CORNERS


def _named(groups: str, names: str) -> tuple[str, ...]:
    return tuple(f"{group}/{name}" for group in groups.split() for name in names.split())


NORM = "mean std cv q05 q25 q50 q75 q95"
TRAINING = (
    *_named("train", "loss negative_mean negative_variance alignment uniformity rankme"),
    *_named("train", "rankme_unit temperature scale_ratio effective_temperature exponent_left"),
    *_named("train", "exponent_right lr gradient_norm clip_rate norm_penalty"),
    *(f"train/norm_{side}_{what}" for side in ("left", "right") for what in NORM.split()),
    *_named("run", "seconds steps samples kept_steps"),
    "validation/score",
)
CONTRASTIVE = (*TRAINING, *_named("train", "contrastive variance gor"))
VISION = (
    *CONTRASTIVE,
    *_named("test untrained", "majority knn knn_raw probe probe_raw knn_embedding"),
    *_named("test untrained", "knn_embedding_cosine knn_embedding_dot probe_embedding"),
    *_named("test untrained", "probe_embedding_raw norm_auroc ece ece_with_norm ood_auroc nmi"),
    *_named("test untrained", "backbone_norm_auroc backbone_ece backbone_ece_with_norm"),
    *_named("test untrained", "backbone_ood_auroc norm_backbone_mean norm_backbone_cv"),
    *_named("test untrained", "norm_embedding_mean norm_embedding_cv rankme_backbone"),
    *_named("test untrained", "rankme_embedding negative_mean negative_variance probe_polar"),
    *_named("test untrained", "probe_embedding_polar"),
)
RETRIEVED = "i2t_r1 i2t_r5 i2t_r10 t2i_r1 t2i_r5 t2i_r10"
CLIP = (
    *CONTRASTIVE,
    *_named("train", "gap gap_raw norm_ratio log_norm_cosine_correlation"),
    *_named("test untrained style", f"{RETRIEVED} mean_r1"),
    *_named("test untrained style", " ".join(f"chance_{name}" for name in RETRIEVED.split())),
    *_named("test untrained style", "zero_shot_* chance_* majority_*"),
    *_named("test untrained", " ".join(f"i2t_r1_scored_{cell}" for cell in CORNERS)),
    *_named("test untrained", " ".join(f"t2i_r1_scored_{cell}" for cell in CORNERS)),
    *_named("test untrained", "modality_gap modality_gap_raw norm_ratio norm_image_mean"),
    *_named("test untrained", "norm_image_cv norm_text_mean norm_text_cv i2t_hubness t2i_hubness"),
    *_named("test untrained", "i2t_hub_norm_correlation t2i_hub_norm_correlation"),
    *_named("test untrained", "log_norm_cosine_correlation cohens_d_image_right"),
    *_named("test untrained", "cohens_d_text_right cohens_d_image_distractors"),
    *_named("test untrained", "cohens_d_text_distractors judged_pairs judgement_spearman"),
    *_named("test untrained", "judgement_spearman_* cohens_d_image_judged cohens_d_text_judged"),
)
RETRIEVAL = (
    *CONTRASTIVE,
    *_named("train", "fisher_query fisher_document"),
    *_named("test test/* untrained untrained/*", "ndcg10 recall100 mrr10 norm_query_mean"),
    *_named("test test/* untrained untrained/*", "norm_query_cv norm_document_mean cohens_d"),
    *_named("test test/* untrained untrained/*", "norm_document_cv hubness_skewness"),
    *_named("test test/* untrained untrained/*", "hubness_norm_correlation ndcg10_by_*"),
    *_named("test test/* untrained untrained/*", "answer_in_top* reader_em reader_f1"),
    *_named("test test/* untrained untrained/*", "ndcg10_permuted cohens_d_permuted"),
    *_named("test test/* untrained untrained/*", "norm_leverage"),
    *_named("test untrained", "norm_gain_mean norm_gain_r norm_gain_r_permuted"),
    *(
        f"{group}/ndcg10_scored_{cell}"
        for group in ("test", "test/*", "untrained", "untrained/*")
        for cell in CORNERS
    ),
    *_named("test test/*", "floor"),
    *_named("bm25 bm25/*", "ndcg10"),
)
STS = (
    *TRAINING,
    *_named("train", "error score_scale"),
    *_named("test untrained", "pearson spearman mse norm_left_mean norm_left_cv"),
    *_named("test untrained", "norm_right_mean norm_right_cv"),
    *_named("test untrained", " ".join(f"spearman_scored_{cell}" for cell in CORNERS)),
)
MEASURES = {
    "train_simclr": VISION,
    "train_moco": VISION,
    "train_clip": CLIP,
    "train_retrieval": RETRIEVAL,
    "train_sts": STS,
    "matrix_factorization": (
        *_named("data truncated full remedy ambiguity denoising descent remedy/*", "*"),
    ),
    "simplex": _named("landing bound separation extremes band gradient uniformity partitions", "*"),
    "norm_growth": _named("identity steps fit grad_scale published angle cut decay class", "*"),
    "planted": (
        *_named("*", "ndcg@10 ndcg@10_shuffled gain gain_low gain_high keep_minus_discard"),
        *_named("*", "counter_slope counter_correlation"),
        *_named("contrast", "*"),
        *_named("planted", "expected detected p"),
    ),
}
"""By script; one that is not listed is not checked."""


def unmeasured(script: str, names: Iterable[str]) -> list[str]:
    """Those of the names that a script does not measure."""
    known = MEASURES.get(script, ("*",))
    return [name for name in names if not any(fnmatchcase(name, one) for one in known)]


def check_metric(what: str, metric: str, scripts: Iterable[str]) -> None:
    """Refuse a metric that none of the scripts measures, with the nearest ones as the remedy."""
    scripts = sorted(set(scripts))
    if not all(unmeasured(script, [metric]) for script in scripts):
        return
    known = list(dict.fromkeys(name for script in scripts for name in MEASURES[script]))
    near = difflib.get_close_matches(metric, known, n=3, cutoff=0.5) or known[:3]
    raise ValueError(
        f"{what} {metric!r} is not measured by {', '.join(scripts)}. Did you mean "
        f"{' or '.join(map(repr, near))}?"
    )
