"""torch.compile of a training step with each drop-in: one graph, one node, eager's gradients."""

import pytest
import torch

from offsphere import dropin

EPS = torch.finfo(torch.float32).eps
LOSSES = {
    "ClipLoss": (torch.tensor(7.0),),
    "SigLipLoss": (torch.tensor(7.0), torch.tensor(-3.0)),
    "NTXentLoss": (),
    "DCLLoss": (),
}
TERMS = {"cell": "dnorm", "variance_weight": 2.0, "population": 100, "gor_weight": 1.0}


@pytest.mark.parametrize("options", [{}, TERMS])
@pytest.mark.parametrize("rows", [48, 150])
@pytest.mark.parametrize("name", LOSSES)
def test_one_graph_with_the_gradients_of_eager(name, rows, options):
    torch.manual_seed(0)
    loss, tower = getattr(dropin, name)(**options), torch.nn.Linear(8, 16)
    a, b = torch.randn(2, rows, 8)
    nodes = []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(a, b):
        return loss(tower(a), tower(b), *LOSSES[name])

    found = []
    torch._dynamo.reset()
    for call in (torch.compile(step, fullgraph=True, backend=backend), step):
        tower.zero_grad()
        value = call(a, b)
        value.backward()
        found.append((value.detach(), tower.weight.grad))
    assert sum("offsphere" in node for node in nodes) == 1
    (value, gradient), (expected, wanted) = found
    torch.testing.assert_close(value, expected, rtol=4 * EPS, atol=0)
    # The rows that eager streams are computed alike; few rows are tiled here and dense in eager.
    ulp = EPS * wanted.abs().max()
    assert (gradient - wanted).abs().max() <= (2 if rows > 128 else 4) * ulp


def test_a_bad_row_is_refused_when_a_compiled_loss_runs():
    loss = torch.compile(dropin.ClipLoss(), fullgraph=True, backend="aot_eager")
    bad = torch.full((150, 4), torch.nan)
    with pytest.raises(ValueError, match="finite embeddings"):
        loss(bad, torch.ones(150, 4), torch.tensor(3.0))
