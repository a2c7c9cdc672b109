"""What each figure of the theory lane shows, its numbers and the claims it illustrates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Caption(NamedTuple):
    title: str
    drawn: str
    """What is drawn, for those who do not see it."""
    says: str
    """What to look for."""
    numbers: Mapping[str, str]
    """The metrics that stand beside the figure, each with its name in words."""
    claims: tuple[str, ...]
    """The ids, in configs/claims.yaml, of the claims that the figure illustrates."""


CAPTIONS: dict[tuple[str, str], Caption] = {
    ("matrix_factorization", "heat_maps"): Caption(
        "The same predictions, other cosines",
        "Two rows of six heat maps of the cosines between all items, sorted by cluster: the true "
        "clusters as blocks along the diagonal, four rescalings of the first objective with blocks "
        "of different strength (none for flat items at full rank), and the second objective; above "
        "with truncated rank, below with full rank.",
        "In a row every map but the first and the last belongs to one and the same solution of the "
        "first objective, rescaled by a diagonal matrix D, which leaves all predictions as they "
        "are. The second objective (factors) has no such freedom.",
        {
            "descent/rescaled_prediction_gap": "Predictions, largest change by D",
            "descent/rescaled_cosine_gap": "Cosines, largest change by D",
            "truncated/one/auroc": "AUROC of same cluster, D = 1",
            "truncated/items_flat/auroc": "AUROC, flat items",
            "full/items_flat/auroc": "AUROC, flat items, full rank",
            "truncated/factors/auroc": "AUROC, second objective",
        },
        ("diagonal-freedom", "cosine-identity", "factorisation-closed-forms"),
    ),
    ("matrix_factorization", "remedies"): Caption(
        "The proposed remedies",
        "Six heat maps of the cosines between all items, sorted by cluster: the true clusters, "
        "cosine-trained, layer normalisation, reconstructed space, standardised data and inverse "
        "propensity weights.",
        "Training on cosines fixes them. Where D stays free, the range says how far it still moves "
        "the AUROC of same cluster: not at all in the reconstructed space.",
        {
            "remedy/cosine_trained/auroc": "AUROC, cosine-trained",
            "remedy/layer_norm/auroc": "AUROC, layer normalisation",
            "remedy/reconstructed/auroc": "AUROC, reconstructed space",
            "remedy/reconstructed/auroc_range": "Range over D, reconstructed space",
            "remedy/standardised/auroc_range": "Range over D, standardised",
            "remedy/inverse_propensity/auroc_range": "Range over D, inverse propensity",
        },
        (),
    ),
    ("matrix_factorization", "ambiguity"): Caption(
        "How many neighbours survive a rescaling",
        "Two falling lines: the share of cosine neighbours that stay neighbours when the columns "
        "are rescaled, against the spread of the log scales, from left to right and among the "
        "right side's own vectors.",
        "The dot products do not move; the nearest neighbours by cosine do, the more the wider the "
        "scales are spread.",
        {
            "ambiguity/factorisation/dot_change_1": "Dot products, relative change, spread 1",
            "ambiguity/factorisation/pair_overlap_1": "Shared neighbours, left to right",
            "ambiguity/factorisation/right_overlap_1": "Shared neighbours, right to right",
        },
        ("diagonal-freedom",),
    ),
    ("simplex", "landing"): Caption(
        "Where each loss lands in full batches",
        "For six losses the similarities of positive pairs, all at 1, and of negative pairs, at "
        "-1/(n-1) for all but the spectral loss, whose negatives are at 0.",
        "Embeddings optimised directly end at the simplex. The spectral loss is outside of the "
        "theorem: its negatives are best when orthogonal. Distance: the largest deviation of a "
        "similarity from the simplex.",
        {
            "landing/info_nce/distance": "Distance, info_nce",
            "landing/nt_xent/distance": "Distance, nt_xent",
            "landing/dcl/distance": "Distance, dcl",
            "landing/dhel/distance": "Distance, dhel",
            "landing/siglip/distance": "Distance, siglip",
            "landing/spectral/distance": "Distance, spectral",
            "bound/smallest_slack": "Bound on positives, smallest slack",
        },
        ("full-batch-simplex", "similarity-bound"),
    ),
    ("simplex", "separation"): Caption(
        "SigLIP can separate too far, and the cure",
        "Left: similarities of positive and negative pairs at SigLIP's optimum against b; both "
        "fall as b falls below a threshold, and the optimised points lie on the closed form; with "
        "within-view negatives they stay at the simplex. Right: the same at SigLIP's usual start "
        "against the number of instances; both fall beyond a threshold.",
        "Below the threshold in b, or above the one in n, negatives are pushed under -1/(n-1) and "
        "take the positives with them. Within-view negatives hold both.",
        {
            "separation/closed_form_error": "Optimised minus closed form, largest",
            "separation/cured_distance": "Distance from the simplex when cured",
            "separation/siglip_threshold_n": "Threshold n at the usual start",
        },
        ("excessive-separation", "siglip-threshold"),
    ),
    ("simplex", "band"): Caption(
        "Fixed mini-batches leave variance, inside theory's band",
        "The variance of negative similarities against the batch size of a fixed partition, on "
        "logarithmic axes: InfoNCE inside the grey band of the theorem, the variance term inside "
        "each batch a little lower, the variance term over all pairs far below.",
        "The band holds for InfoNCE alone, at the optimum of a fixed partition; training with "
        "reshuffled batches lies elsewhere. The term leaves the theorem's assumptions.",
        {
            "band/2/least": "Batch size 2, lower end",
            "band/2/plain": "Batch size 2, InfoNCE",
            "band/2/largest": "Batch size 2, upper end",
            "band/6/least": "Batch size 6, lower end",
            "band/6/plain": "Batch size 6, InfoNCE",
            "band/6/largest": "Batch size 6, upper end",
            "partitions/cases": "Random optima tried",
            "partitions/outside_the_band": "Of these outside the band",
        },
        ("mini-batch-variance",),
    ),
    ("norm_growth", "steps"): Caption(
        "Steps to align grow with the square of the norm",
        "Left: steps until pairs are aligned against their norm, on logarithmic axes: plain "
        "gradients on a line of slope 2, gradients times the norm on one of slope 1, gradients "
        "times its square on a flat one; the published crosses lie on the plain line. Right: "
        "steps against the angle at the start, rising steeply towards opposite vectors, with the "
        "published crosses on the line.",
        "A longer embedding turns more slowly. Multiplying the gradient by a power of the norm, or "
        "cutting the norm at the start, takes the delay away.",
        {
            "fit/exponent": "Slope, plain",
            "grad_scale/exponent_power1": "Slope, gradient times norm",
            "grad_scale/exponent_power2": "Slope, gradient times norm squared",
            "published/largest_deviation": "Largest deviation from the published steps",
            "cut/speed_up": "Times fewer steps by cut initialisation",
        },
        ("quadratic-steps",),
    ),
    ("norm_growth", "norms"): Caption(
        "Norms settle under weight decay",
        "Left: three norms, started too short, right and too long, all reach the settled norm. "
        "Right: mean embedding norms of four classes of different frequency over the epochs of a "
        "small network; they rise at first and then slowly fall.",
        "Without decay a norm never shrinks for a free vector; with it, it settles where growth "
        "and decay balance. In a network the weights move the norms too, and a frequent class need "
        "not grow most: the last number says how often it outgrew a rare one.",
        {
            "identity/shrunk": "Free vectors that a plain step shortened",
            "identity/radial_cosine": "Radial part of a gradient, largest",
            "decay/largest_deviation": "Deviation from the settled norm",
            "class/frequent_outgrew_rare": "Share of runs, frequent outgrew rare",
        },
        ("norms-only-grow", "tangent-gradient"),
    ),
    ("planted", "cells"): Caption(
        "A planted magnitude signal is found",
        "Three bars for each cell: held-out nDCG@10 with its own score, with the magnitudes of "
        "the documents shuffled, and with their norms discarded. The first bar is the highest for "
        "the cells that keep the document's norm; for the other two all three are equal.",
        "Relevance was written into the norms of the documents. A cell that keeps them loses what "
        "they carry when they change places; cosine and dnorm do not see them and lose nothing.",
        {
            "qnorm/gain": "What qnorm gains by its magnitudes, nDCG@10",
            "dot/gain": "What dot gains",
            "cosine/gain": "What cosine gains",
            "dnorm/gain": "What dnorm gains",
            "planted/p": "p of the verdict, from qnorm",
        },
        (),
    ),
    ("planted", "counter"): Caption(
        "Free vectors count their relevant queries",
        "The norms of free document vectors against the number of relevant queries, both on "
        "logarithmic axes, one colour per cell: rising points for the cells that keep the norm of "
        "the document, a flat line of points for the other two.",
        "Trained as free vectors, documents with more relevant queries grow longer under the cells "
        "that let a norm act on the score, and hardly at all under those that discard it.",
        {
            "qnorm/counter_slope": "Slope, qnorm",
            "dot/counter_slope": "Slope, dot",
            "cosine/counter_slope": "Slope, cosine",
            "dnorm/counter_slope": "Slope, dnorm",
        },
        (),
    ),
}
