"""Interventions on norms: cut initialisation, scaled gradients, a penalty on their spread."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offsphere.encoders.images import image_encoder
from offsphere.interventions import cut_initialisation, grad_scale, norm_penalty


def test_cut_initialisation_divides_every_parameter_and_no_statistic():
    torch.manual_seed(0)
    encoder = image_encoder("resnet18", image_size=32)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    cut_initialisation(encoder, 3)
    parameters = dict(encoder.named_parameters())
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name] / 3 if name in parameters else before[name])
    with pytest.raises(ValueError, match="above 0"):
        cut_initialisation(encoder, 0)


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_grad_scale_multiplies_each_rows_gradient(power):
    torch.manual_seed(0)
    x = (torch.randn(5, 3, dtype=torch.float64) * 4).requires_grad_()
    weight = torch.randn(5, 3, dtype=torch.float64)
    out = grad_scale(x, power)
    assert torch.equal(out, x)
    (gradient,) = torch.autograd.grad((out.sin() * weight).sum(), x)
    for row, z in enumerate(x.detach()):
        norm = sum(float(value) ** 2 for value in z) ** 0.5
        torch.testing.assert_close(gradient[row], weight[row] * z.cos() * norm**power)


def test_grad_scale_one_frees_the_cosine_gradient_of_the_norm():
    """|d cos / dx| falls with 1 / |x|; scaled with power 1 it is the same at every length."""
    direction = torch.tensor([[3.0, 4.0, 0.0]], dtype=torch.float64) / 5
    other = torch.tensor([0.0, 0.6, 0.8], dtype=torch.float64)
    for length in (0.1, 1.0, 30.0):
        x = (direction * length).requires_grad_()
        z = grad_scale(x, 1.0)
        (z / z.norm(dim=1, keepdim=True) @ other).sum().backward()
        expected = other - (direction[0] @ other) * direction[0]
        torch.testing.assert_close(x.grad[0], expected)


def test_grad_scale_keeps_zero_rows_finite():
    x = torch.zeros(2, 3, requires_grad=True)
    grad_scale(x, 1.0).sum().backward()
    assert x.grad.abs().max() < 1e-11


def test_norm_penalty_in_closed_form():
    x = torch.tensor([[2.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
    log2 = torch.log(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(norm_penalty(x, 1.0), log2**2)
    torch.testing.assert_close(norm_penalty(x), log2**2)
    torch.testing.assert_close(norm_penalty(x, 2.0), (2 * log2) ** 2 / 2)
    assert norm_penalty(5 * torch.eye(3)).item() == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="target norm must be above 0"):
        norm_penalty(x, 0.0)


def test_norm_penalty_is_the_squared_cv_for_small_spreads():
    torch.manual_seed(0)
    lengths = 7 + 0.07 * torch.randn(4000, 1, dtype=torch.float64)
    x = nn.functional.normalize(torch.randn(4000, 5, dtype=torch.float64), dim=1) * lengths
    values = lengths[:, 0].tolist()
    cv = statistics.pstdev(values) / statistics.fmean(values)
    assert norm_penalty(x).item() == pytest.approx(cv**2, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 100))
def test_norm_penalty_without_target_ignores_the_common_scale(seed, scale):
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(norm_penalty(scale * x), norm_penalty(x))
    torch.testing.assert_close(norm_penalty(scale * x, 2 * scale), norm_penalty(x, 2.0))


def test_norm_penalty_has_exact_and_finite_gradients():
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    assert torch.autograd.gradcheck(norm_penalty, (x,))
    assert torch.autograd.gradcheck(lambda x: norm_penalty(x, 3.0), (x,))
    zero = torch.zeros(2, 3, requires_grad=True)
    norm_penalty(zero, 1.0).backward()
    assert torch.equal(zero.grad, torch.zeros(2, 3))
