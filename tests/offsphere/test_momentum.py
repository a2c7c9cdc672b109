"""The averaged twin, the queue against a deque, and the key forward without a batch-norm leak."""

import copy
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offsphere.momentum import MomentumTwin, Queue, encode_without_leak, momentum_at


def small_network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_twin_starts_at_the_same_weights_and_takes_no_gradient():
    source = small_network()
    twin = MomentumTwin(source, 0.9)
    for mine, theirs in zip(twin.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
        assert not mine.requires_grad
        assert theirs.requires_grad
    assert not twin(torch.randn(8, 4)).requires_grad


def test_twin_averages_parameters_and_statistics_and_copies_counts():
    source = small_network()
    twin = MomentumTwin(source, 0.75)
    slow = {name: value.clone().double() for name, value in source.state_dict().items()}
    for step in range(5):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator(step)))
        source(torch.randn(16, 4, generator=generator(step)))
        assert twin.update() == 0.75
        for name, value in source.state_dict().items():
            slow[name] = 0.75 * slow[name] + 0.25 * value.double()
    for name, value in twin.module.state_dict().items():
        if name == "1.num_batches_tracked":
            assert value.item() == 5
        else:
            torch.testing.assert_close(value.double(), slow[name], rtol=1e-5, atol=1e-6)


def test_twin_agrees_with_lightly():
    utils = pytest.importorskip("lightly.models.utils")
    source = small_network(1)
    twin, peer = MomentumTwin(small_network(0), 0.99), small_network(0)
    twin._source = (source,)
    twin.update()
    utils.update_momentum(source, peer, 0.99)
    for mine, theirs in zip(twin.module.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_twin_state_dict_holds_the_copy_once_and_restores_it_bit_by_bit():
    source = small_network()
    twin = MomentumTwin(source, 0.5)
    with torch.no_grad():
        source[0].weight.mul_(2)
    twin.update()
    assert set(twin.state_dict()) == {f"module.{name}" for name in source.state_dict()}
    restored = MomentumTwin(source, 0.5)
    restored.load_state_dict(twin.state_dict())
    for name, value in restored.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])


def test_twin_keeps_the_memory_format_of_the_source():
    source = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    twin = MomentumTwin(source, 0.5)
    with torch.no_grad():
        source.weight.add_(1)
    expected = source.weight.detach() - 0.5
    twin.update()
    assert twin.module.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(twin.module.weight, expected)


def test_cosine_momentum_agrees_with_lightly():
    scheduler = pytest.importorskip("lightly.utils.scheduler")
    for step in range(11):
        peer = scheduler.cosine_schedule(step, 11, 0.99, 1.0)
        assert momentum_at(0.99, "cosine", step / 10) == pytest.approx(peer, abs=1e-12)
    assert momentum_at(0.99, "constant", 0.7) == 0.99


def test_twin_refuses_bad_settings():
    with pytest.raises(ValueError, match=r"0 to 1, got 1\.5"):
        MomentumTwin(small_network(), 1.5)
    with pytest.raises(ValueError, match="Did you mean 'cosine'"):
        MomentumTwin(small_network(), 0.9, schedule="cosin")


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9),
    batches=st.lists(st.integers(1, 23), min_size=1, max_size=12),
    cut=st.integers(0, 11),
)
def test_queue_equals_a_deque_also_through_a_state_dict(size, batches, cut):
    queue, reference = Queue(size, 2), deque(maxlen=size)
    count = 0
    for step, batch in enumerate(batches):
        keys = torch.arange(count, count + batch).float()[:, None].expand(-1, 2) + 0.5
        count += batch
        queue.enqueue(keys)
        reference.extend(keys.tolist())
        if step == cut:
            saved = copy.deepcopy(queue.state_dict())
            queue = Queue(size, 2)
            queue.load_state_dict(saved)
        oldest = int(queue.pointer) if len(reference) == size else 0
        assert queue.keys.roll(-oldest, dims=0).tolist() == list(reference)
        assert int(queue.filled) == len(reference)
        assert int(queue.pointer) == count % size


def test_the_smallest_queue_holds_the_last_key():
    queue = Queue(1, 1)
    for value in (3.0, 4.0):
        queue.enqueue(torch.tensor([[value - 1], [value]]))
        assert queue.keys.tolist() == [[value]]
    assert queue.initialise(torch.tensor([[7.0]]), generator()) == "encoded"
    assert queue.keys.tolist() == [[7.0]]
    for size, dim in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"{size} x {dim}"):
            Queue(size, dim)


def test_queue_keeps_raw_keys_without_gradient():
    queue = Queue(4, 3)
    keys = torch.tensor([[30.0, 0, 4], [0, 0.01, 0]], requires_grad=True)
    queue.enqueue(keys)
    assert torch.equal(queue.keys, keys.detach())
    assert not queue.keys.requires_grad


def test_queue_starts_with_random_directions_at_the_encoders_norms():
    queue = Queue(4000, 16)
    keys = torch.randn(3, 16, generator=generator(1))
    keys = keys / keys.norm(dim=1, keepdim=True) * torch.tensor([[2.0], [5.0], [11.0]])
    assert queue.initialise(keys, generator(2)) == "random"
    norms = queue.keys.norm(dim=1)
    counts = [int(((norms - norm).abs() < 1e-4).sum()) for norm in (2, 5, 11)]
    assert sum(counts) == 4000
    assert all(abs(count - 4000 / 3) < 4 * (4000 * 2 / 9) ** 0.5 for count in counts)
    directions = queue.keys / norms[:, None]
    moments = directions.T @ directions / 4000
    torch.testing.assert_close(moments, torch.eye(16) / 16, rtol=0, atol=0.01)
    assert directions.mean(0).norm() < 0.05
    again = Queue(4000, 16)
    again.initialise(keys, generator(2))
    assert torch.equal(again.rows, queue.rows)


def test_queue_starts_with_encoded_keys_when_there_are_enough():
    queue, keys = Queue(3, 2), torch.arange(10.0).view(5, 2)
    assert queue.initialise(keys, generator()) == "encoded"
    assert torch.equal(queue.keys, keys[-3:])
    queue.enqueue(torch.full((1, 2), 99.0))
    assert queue.rows.tolist() == [[99, 99], [6, 7], [8, 9]]


def test_queue_refuses_keys_of_another_width():
    with pytest.raises(ValueError, match=r"3 numbers each, got a tensor of shape \(2, 4\)"):
        Queue(5, 3).enqueue(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="at least one key"):
        Queue(5, 3).initialise(torch.zeros(0, 3), generator())
    with pytest.raises(ValueError, match="0 x 3"):
        Queue(0, 3)


class BatchNormOnly(nn.Module):
    """Shows what batch-norm saw: the raw input, and its normalised form."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False, momentum=None)

    def forward(self, images):
        return images.mean((2, 3)), self.norm(images).mean((2, 3))


def test_one_group_equals_the_plain_forward():
    encoder = BatchNormOnly()
    images = torch.randn(10, 3, 4, 4, generator=generator())
    features, embedding = encode_without_leak(encoder, images, 1, generator(3))
    expected_features, expected_embedding = encoder(images)
    torch.testing.assert_close(features, expected_features)
    torch.testing.assert_close(embedding, expected_embedding)


@pytest.mark.parametrize(("count", "groups"), [(12, 3), (11, 4)])
def test_each_group_is_normalised_by_its_own_shuffled_company(count, groups):
    images = torch.randn(count, 3, 4, 4, generator=generator()) * torch.arange(1.0, count + 1).view(
        -1, 1, 1, 1
    )
    features, embedding = encode_without_leak(BatchNormOnly(), images, groups, generator(3))
    order = torch.randperm(count, generator=generator(3)).tolist()
    torch.testing.assert_close(features, images.mean((2, 3)))
    start = 0
    for group in range(groups):
        size = count // groups + (group < count % groups)
        members = order[start : start + size]
        start += size
        company = images[members]
        mean = company.mean((0, 2, 3), keepdim=True)
        var = company.var((0, 2, 3), keepdim=True, correction=0)
        expected = ((company - mean) / (var + 1e-5).sqrt()).mean((2, 3))
        torch.testing.assert_close(embedding[members], expected, rtol=1e-4, atol=1e-5)
    assert start == count


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_outputs_come_back_in_the_order_of_the_images(groups):
    """Each output beside its own image, for a shuffle that is not its own inverse."""
    order = torch.randperm(9, generator=generator(1))
    assert not torch.equal(order[order], torch.arange(9))
    images = torch.arange(9.0).view(9, 1, 1, 1).expand(9, 3, 2, 2)
    seen = []

    def encoder(batch):
        seen.extend(batch[:, 0, 0, 0].tolist())
        return batch[:, :, 0, 0], 10 * batch[:, 0, 0, 0]

    features, tens = encode_without_leak(encoder, images, groups, generator(1))
    assert seen == order.tolist()
    assert features[:, 0].tolist() == list(range(9))
    assert tens.tolist() == [10.0 * k for k in range(9)]


def test_groups_need_company():
    with pytest.raises(ValueError, match="4 groups of 7 images"):
        encode_without_leak(BatchNormOnly(), torch.zeros(7, 3, 2, 2), 4, generator())
