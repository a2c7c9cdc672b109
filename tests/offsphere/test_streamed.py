"""torch.compile of a training step with each drop-in: one graph, one node, eager's gradients."""

import importlib.util
from pathlib import Path
from shutil import which

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offsphere import dropin

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EPS = torch.finfo(torch.float32).eps
LOSSES = {
    "ClipLoss": (torch.tensor(7.0),),
    "SigLipLoss": (torch.tensor(7.0), torch.tensor(-3.0)),
    "NTXentLoss": (),
    "DCLLoss": (),
}
TERMS = {"cell": "dnorm", "variance_weight": 2.0, "population": 100, "gor_weight": 1.0}


@pytest.mark.parametrize("options", [{}, {"cell": "dot"}, TERMS])
@pytest.mark.parametrize("rows", [48, 150])
@pytest.mark.parametrize("name", LOSSES)
def test_one_graph_with_the_gradients_of_eager(name, rows, options):
    """Of a step with a tower; that inductor makes of a tower is not looked at here."""
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
    assert sum("log_partitions" in node or "softplus" in node for node in nodes) == 1
    (value, gradient), (expected, wanted) = found
    torch.testing.assert_close(value, expected, rtol=4 * EPS, atol=0)
    assert (gradient - wanted).abs().max() <= 2 * EPS * wanted.abs().max()


@pytest.mark.parametrize("options", [{}, {"cell": "dot"}])
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("name", LOSSES)
def test_few_rows_have_eagers_bits(name, rows, options):
    """There autograd of the definition serves in eager, and its gradients by hand here."""
    torch.manual_seed(rows)
    loss, found = getattr(dropin, name)(**options), []
    more = [x.clone().requires_grad_() for x in LOSSES[name]]
    torch._dynamo.reset()
    for call in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        torch.manual_seed(rows)
        sides = [x.requires_grad_() for x in torch.randn(2, rows, 16)]
        value = call(*sides, *more)
        found.append([value.detach(), *torch.autograd.grad(value, [*sides, *more])])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_bad_row_is_refused_when_a_compiled_loss_runs():
    loss = torch.compile(dropin.ClipLoss(), fullgraph=True, backend="aot_eager")
    bad = torch.full((150, 4), torch.nan)
    with pytest.raises(ValueError, match="finite embeddings"):
        loss(bad, torch.ones(150, 4), torch.tensor(3.0))


needs_compiler = pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/compiled.py, which compiles ours and the peer's."""
    spec = importlib.util.spec_from_file_location("compiled", BENCHMARKS / "compiled.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_compiler()
    return module


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # lightly's, between its graphs
@pytest.mark.parametrize("name", LOSSES)
def test_inductor_keeps_the_gradients_of_eager_and_is_soon_done(monkeypatch, benchmark, name):
    """At a low temperature too. Compiling takes at most twice as long as the peer's loss does."""
    if name == "ClipLoss":
        monkeypatch.setattr(benchmark, "SCALE", torch.tensor(100.0))
    mine = benchmark.compiled(benchmark.ours(name), whole=True)
    assert mine.ulps <= 2
    assert benchmark.compiled(benchmark.ours(name, cell="dot"), whole=True).ulps <= 2
    assert mine.seconds <= 2 * benchmark.compiled(benchmark.peer(name), whole=False).seconds


LATER = {  # what the first batch or an earlier one has set
    "calibrated ClipLoss": ("ClipLoss", {"cell": "dot", "scale": "calibrated"}),
    "calibrated NTXentLoss": ("NTXentLoss", {"cell": "learnable", "scale": "calibrated"}),
    "bank": ("NTXentLoss", {"memory_bank_size": (64, 16), "cell": "dnorm"}),
    "calibrated bank": (
        "NTXentLoss", {"memory_bank_size": (64, 16), "cell": "learnable", "scale": "calibrated"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LATER)
def test_three_compiled_steps_calibrate_and_fill_the_bank_as_eager_ones(case):
    name, options = LATER[case]
    found = []
    torch._dynamo.reset()
    for compiled in (True, False):
        torch.manual_seed(0)
        loss, sides = getattr(dropin, name)(**options), torch.randn(3, 2, 150, 16)
        call = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        gradients = []
        for a, b in sides:
            x, y = (z.clone().requires_grad_() for z in (a, b))
            gradients += torch.autograd.grad(call(x, y, *LOSSES[name]), x)
        state = [x.clone() for x in loss.state_dict().values()]
        found.append((gradients, state))
    (gradients, state), (wanted, expected) = found
    for x, y in zip(gradients, wanted, strict=True):
        assert (x - y).abs().max() <= 2 * EPS * y.abs().max()
    for x, y in zip(state, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * EPS, atol=0)


def test_a_compiled_loss_that_was_never_calibrated_is_refused_in_evaluation():
    loss = torch.compile(
        dropin.ClipLoss(cell="dot", scale="calibrated").eval(), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match="before its first training batch"):
        loss(torch.randn(9, 4), torch.randn(9, 4), torch.tensor(3.0))


@pytest.mark.parametrize("name", LOSSES)
def test_one_graph_on_a_card_without_data(name):
    """Dynamo traces the loss on a fake CUDA device: no break, no look at a value."""
    loss, nodes = getattr(dropin, name)(), []
    more = tuple(float(x) for x in LOSSES[name])

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with FakeTensorMode():
        a, b = torch.empty(2, 300, 16, device="cuda")
        value = torch.compile(loss, fullgraph=True, backend=backend)(a, b, *more)
    assert value.device.type == "cuda"
    assert value.shape == ()
    assert sum("offsphere" in node for node in nodes) == 1
