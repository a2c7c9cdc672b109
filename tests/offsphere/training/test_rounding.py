"""Rounded products: closed forms, and the gradients' errors that the doctor tells."""

import pytest
import torch
from torch import Tensor

from offsphere import losses
from offsphere.objective import Objective
from offsphere.training import doctor
from offsphere.training.experiment import Method
from offsphere.training.rounding import Rounded, rounded
from offsphere.training.settings import TrainSettings


def numbers():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, generator=g) * torch.logspace(-30, 30, 10_000)
    ties = 1 + torch.arange(4096) * 2.0**-11
    return torch.cat([x, ties, -ties, torch.zeros(1)])


@pytest.mark.parametrize("bits", [7, 10])
def test_rounded_is_the_nearest_number_with_so_many_bits(bits):
    """x = m 2**e with 0.5 <= m < 1 has its bits before and after the point in m 2**(bits + 1)."""
    x = numbers()
    m, e = torch.frexp(x.double())
    expected = torch.ldexp(torch.round(m * 2 ** (bits + 1)) / 2 ** (bits + 1), e)
    assert torch.equal(rounded(x, bits).double(), expected)
    if bits == 7:
        assert torch.equal(rounded(x, bits), x.bfloat16().float())


def test_products_are_rounded_forward_and_backward():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 5, generator=g, requires_grad=True) for _ in range(2))
    with Rounded(7, results=True):
        (a @ b).backward(torch.ones(5, 5))
        product = torch.mm(a.detach(), b.detach(), out=torch.empty(5, 5))
    x, y = a.detach().bfloat16().float(), b.detach().bfloat16().float()
    assert torch.equal(product, (x @ y).bfloat16().float())
    assert a.grad is not None
    assert torch.equal(a.grad, (torch.ones(5, 5) @ y.T).bfloat16().float())
    with Rounded(10):
        whole = torch.addmm(torch.ones(5), a.detach(), b.detach())
    assert torch.equal(
        whole, torch.addmm(torch.ones(5), *(rounded(z.detach(), 10) for z in (a, b)))
    )


class Given(Method):
    """Embeddings as they are."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.objective = Objective(
            "cosine", "info_nce", population=9, temperature=temperature, scale="fixed"
        )

    def inputs(self, batch: dict[str, Tensor], step: int, rows=None) -> dict[str, Tensor]:
        return batch

    def embed(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs

    def losses(self, embedded: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.objective(embedded["left"], embedded["right"])


def pairs(n: int, d: int, common: float = 0.1) -> dict[str, Tensor]:
    """Right rows that have little of their left ones, as early in training, or more."""
    g = torch.Generator().manual_seed(0)
    left = torch.randn(n, d, generator=g)
    return {"left": left, "right": common * left + torch.randn(n, d, generator=g)}


@pytest.mark.parametrize(
    ("temperature", "most"),
    [
        (0.07, {"fp32": 1e-6, "tf32": 1e-3, "bf16": 1e-2}),
        (0.002, {"fp32": 5e-6, "tf32": 4e-3, "bf16": 1e-1}),
    ],
)
def test_errors_are_those_of_products_that_are_rounded_by_hand(temperature, most):
    batch = pairs(150, 64)  # streamed: its products are those of tiles
    found = doctor.gradient_errors(Given(temperature), batch)
    for name, error in found.items():
        assert most[name] / 10 < error < most[name], name
    assert found["tf32"] == pytest.approx(by_hand(batch, temperature), rel=0.15)


def by_hand(batch: dict[str, Tensor], temperature: float) -> float:
    """The error of tf32 in one-line formulas: shares of rows and columns minus the positives."""

    def gradient(x: Tensor, y: Tensor, rounds) -> Tensor:
        scores = rounds(x / temperature) @ rounds(y).T
        g = (scores.softmax(1) + scores.softmax(0) - 2 * torch.eye(len(x))) / (2 * len(x))
        return rounds(g) @ rounds(y) / temperature

    raw = {name: x.double() for name, x in batch.items()}
    left = raw["left"].requires_grad_()
    norm = left.norm(dim=1, keepdim=True)
    unit, right = left / norm, torch.nn.functional.normalize(raw["right"])
    losses.info_nce(unit, right, temperature).backward()
    assert left.grad is not None
    x, y = unit.detach().float(), right.float()
    g = gradient(x, y, lambda z: rounded(z, 10)).double()
    u = unit.detach()
    found = (g - u * (u * g).sum(1, keepdim=True)) / norm.detach()
    return ((found - left.grad).norm() / left.grad.norm()).item()


@pytest.mark.parametrize(
    ("temperature", "common", "limit", "safe", "remedy"),
    [
        (0.07, 0.5, 1e-2, "fp32, tf32, bf16", ""),
        (0.03, 1.0, 1e-2, "fp32, tf32", ""),
        (0.03, 1.0, 1e-3, "fp32", "--loss-precision=fp32 on a GPU"),
        (0.02, 1.0, 1e-2, "none", "a higher --temperature"),
    ],
)
def test_the_doctor_says_which_precisions_are_safe(
    monkeypatch, temperature, common, limit, safe, remedy
):
    monkeypatch.setattr(doctor, "SAFE", limit)
    settings, method = TrainSettings(temperature=temperature), Given(temperature)
    finding = doctor.rounded_losses(method, pairs(64, 64, common), settings)
    assert finding.measured.endswith(f"at temperature {temperature}; safe: {safe}")
    assert (finding.check, finding.remedy) == ("loss in tf32", remedy)
    assert finding.verdict == ("warning" if remedy else "ok")
