"""Random crops and flips: exact copies, uniform draws, keyed by the step, in mini-batches and nowhere else."""

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from posterity.errors import BadData
from posterity.model import Affine, Augmentation, Compose, Crop, Flip, as_data
from posterity.model.data import OwnOrders, Reordered
from posterity.numerics import Key
from posterity.numerics.compiled import nothing_read
from posterity.storage import decode, encode

USUAL = Compose((Crop(2), Flip()))
ROWS = 12


def images(rows=ROWS, channels=2, height=6, width=5, lead=()):
    return Key(0).uniform((*lead, rows, channels, height, width))


def labels(rows=ROWS):
    return torch.arange(rows) % 3


def shifted(image: Tensor, padding: int, row: int, column: int) -> Tensor:
    """The image (C, H, W) moved by hand, zeros coming in."""
    found, (height, width) = torch.zeros_like(image), image.shape[-2:]
    for i in range(height):
        for j in range(width):
            a, b = i + row - padding, j + column - padding
            if 0 <= a < height and 0 <= b < width:
                found[:, i, j] = image[:, a, b]
    return found


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_crop_is_the_image_moved_by_whole_pixels(padding, height, width, channels, seed):
    x = images(3, channels, height, width)
    places = (Key(seed).uniform((3, 2), torch.float32) * (2 * padding + 1)).long()
    found = Crop(padding)(x, Key(seed))
    for index, (row, column) in enumerate(places.tolist()):
        assert torch.equal(found[index], shifted(x[index], padding, row, column))


def test_a_crop_by_reflection_has_the_image_mirrored_at_its_edge():
    x = torch.arange(4.0).view(1, 1, 1, 4).expand(200, 1, 4, 4)
    rows = {tuple(row) for row in Crop(2, "reflect")(x, Key(0))[:, 0, 0].long().tolist()}
    assert rows == {(2, 1, 0, 1), (1, 0, 1, 2), (0, 1, 2, 3), (1, 2, 3, 2), (2, 3, 2, 1)}


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_and_number_type_stay_and_the_input_is_untouched(mode, dtype):
    x = images().to(dtype)
    before = x.clone()
    found = Compose((Crop(2, mode), Affine(), Flip()))(x, Key(1))
    assert found.shape == x.shape
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(x, before)


def test_every_place_is_as_likely():
    count, padding = 20_000, 2
    x = torch.arange(1.0, 26.0).view(1, 1, 5, 5).expand(count, 1, 5, 5)
    middle = Crop(padding)(x, Key(3))[:, 0, 2, 2].long()  # which pixel has come to the middle tells the place
    counts = torch.bincount(middle, minlength=26)[1:].double()
    expected = count / 25
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 24) < 5 * math.sqrt(2 * 24)


def turned(image: Tensor, matrix: Tensor) -> Tensor:
    """The image (H, W) whose pixel at `q` from the middle is the bilinear one at matrix^-1 q, by hand; q = (x, y)."""
    height, width = image.shape
    found, back = torch.zeros_like(image), matrix.inverse()
    for i in range(height):
        for j in range(width):
            x, y = (back @ torch.tensor([j - (width - 1) / 2, i - (height - 1) / 2], dtype=matrix.dtype)).tolist()
            x, y = x + (width - 1) / 2, y + (height - 1) / 2
            for a in (math.floor(y), math.floor(y) + 1):
                for b in (math.floor(x), math.floor(x) + 1):
                    if 0 <= a < height and 0 <= b < width:
                        found[i, j] += image[a, b] * (1 - abs(y - a)) * (1 - abs(x - b))
    return found


@given(st.integers(2, 7), st.integers(2, 7), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_an_affine_change_shears_then_zooms_then_rotates_about_the_middle(height, width, seed):
    policy = Affine(degrees=60.0, zoom=0.3, shear=0.4)
    x = images(2, 1, height, width).double()
    amounts = 2.0 * Key(seed).uniform((2, 3), torch.float32).double() - 1.0
    found = policy(x, Key(seed))
    for index, (angle, zoom, shear) in enumerate(amounts.tolist()):
        cos, sin = math.cos(math.radians(60.0 * angle)), math.sin(math.radians(60.0 * angle))
        rotation = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)  # anticlockwise where y goes down
        matrix = rotation @ torch.tensor([[1.0, 0.4 * shear], [0.0, 1.0]], dtype=torch.float64) * (1.0 + 0.3 * zoom)
        torch.testing.assert_close(found[index, 0], turned(x[index, 0], matrix), atol=1e-6, rtol=1e-5)


def test_an_affine_change_by_nothing_leaves_the_images():
    torch.testing.assert_close(Affine(0.0, 0.0, 0.0)(images(), Key(0)), images(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("probability", [0.5, 0.1])
def test_flips_come_with_their_probability_and_mirror_left_to_right(probability):
    count = 10_000
    x = images(1).expand(count, -1, -1, -1)
    found = Flip(probability)(x, Key(4))
    flipped = (found == x.flip(-1)).flatten(1).all(1)
    assert bool((flipped | (found == x).flatten(1).all(1)).all())
    assert abs(int(flipped.sum()) - count * probability) < 5 * math.sqrt(count * probability * (1 - probability))


def test_crop_and_flip_of_one_image_are_independent():
    count = 10_000
    x = torch.arange(1.0, 4.0).view(1, 1, 1, 3).expand(count, 1, 1, 3)
    found = Compose((Flip(), Crop(1)))(x, Key(5))
    row = found.amax(-1).flatten() == 0  # moved out, upright
    plain = (found[..., 1:] > found[..., :-1]).sum(-1).flatten() > 0
    left = (found[:, 0, 0, 2] == 0) & ~row
    seen, mirrored = int((~row).sum()), int((left & ~plain).sum())
    assert abs(seen - count / 3) < 5 * math.sqrt(count * 2 / 9)
    # Of the rows in sight a third moves to the left: 1 2 3 to 2 3 0, which rises at first, 3 2 1 to 2 1 0, which falls.
    assert abs(mirrored - count / 18) < 5 * math.sqrt(count / 18)


def test_the_same_key_makes_the_same_images_and_another_makes_others():
    x = images()
    assert torch.equal(USUAL(x, Key(1)), USUAL(x, Key(1)))
    assert not torch.equal(USUAL(x, Key(1)), USUAL(x, Key(2)))


def test_members_share_the_draws_of_one_key_and_have_their_own_by_several():
    x, keys = images(lead=(3,)), [Key(index) for index in range(3)]
    shared, own = USUAL(x, Key(7)), USUAL(x, keys)
    for index in range(3):
        assert torch.equal(shared[index], USUAL(x[index], Key(7)))
        assert torch.equal(own[index], USUAL(x[index], keys[index]))


@pytest.mark.parametrize("size", [5, None])
@pytest.mark.parametrize("per_member", [False, True], ids=["shared rows", "rows of their own"])
def test_a_member_sees_the_augmented_batches_of_its_key(size, per_member):
    x, y = (images(lead=(3,)), labels().expand(3, -1)) if per_member else (images(), labels())
    data = as_data((x, y), per_member=per_member, augmentation=USUAL)
    orders = OwnOrders(data, lambda key: [key.fold(f"member {index}") for index in range(3)])
    together = list(orders.minibatches(size, 5, Key(2)).from_step(0))
    assert [torch.equal(a.inputs, b.inputs) for a, b in pairwise(together)] == [False] * 4
    for start in (0, 3):
        feed = orders.minibatches(size, 5, Key(2)).from_step(start)
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(feed, together[start:], strict=True))
    for index in range(3):
        alone = as_data(tuple(data.rows.member(index)[:2]), augmentation=USUAL)
        feed = Reordered(alone, f"member {index}").minibatches(size, 5, Key(2)).from_step(0)
        for batch, own in zip(together, feed, strict=True):
            assert batch.per_member
            assert torch.equal(batch.member(index).inputs, own.inputs)
            assert torch.equal(batch.member(index).targets, own.targets)


SOURCES = {
    "tensors": lambda: (images(), labels()),
    "members": lambda: (images(lead=(2,)), labels().expand(2, -1)),
    "dataset": lambda: _Rows(),
    "loader": lambda: DataLoader(TensorDataset(images(), labels()), batch_size=4),
}


class _Rows(torch.utils.data.Dataset):
    """Rows by their number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return images()[index], labels()[index]


@pytest.mark.cpu  # torch's loaders shuffle by generators of the CPU
@pytest.mark.parametrize("name", list(SOURCES))
def test_minibatches_are_augmented_by_the_step_and_passes_are_not(name):
    plain = as_data(SOURCES[name](), per_member=name == "members")
    data = as_data(plain, augmentation=USUAL)
    assert data.num_data == plain.num_data == ROWS
    whole = list(data.minibatches(4, 7, Key(0)).from_step(0))
    for step, (batch, original) in enumerate(zip(whole, plain.minibatches(4, 7, Key(0)).from_step(0), strict=True)):
        key = Key(0).fold("augmentation").fold(step)
        assert torch.equal(batch.inputs, USUAL(original.inputs, key))
        assert torch.equal(batch.targets, original.targets)
    for start in (1, 3, 5):
        rest = data.minibatches(4, 7, Key(0)).from_step(start)
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(rest, whole[start:], strict=True))
    for one, other in zip(data.passes(4).from_step(0), plain.passes(4).from_step(0), strict=True):
        assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(data.first().inputs, plain.first().inputs)
    moved = data.to(torch.device(torch.get_default_device()))
    assert moved.augmentation == USUAL


def test_fingerprints_tell_policies_apart():
    given = [
        None,
        Affine(),
        Affine(5.0),
        Crop(2),
        Crop(1),
        Crop(2, "reflect"),
        Flip(),
        Flip(0.4),
        USUAL,
        Compose((Flip(), Crop(2))),
    ]
    found = [as_data((images(), labels()), augmentation=policy).fingerprint() for policy in given]
    assert len(set(found)) == len(given)
    assert found[0] == as_data((images(), labels())).fingerprint()


@pytest.mark.parametrize("policy", [Affine(5.0, 0.2, 0.0), Crop(3, "reflect"), Flip(0.25), USUAL], ids=repr)
def test_policies_are_stored(policy):
    tensors: dict[str, Tensor] = {}
    assert decode(encode(policy, tensors), tensors) == policy
    assert not tensors


@dataclass(frozen=True)
class Brighter(Augmentation):
    """A policy of one's own."""

    @property
    def numbers(self) -> int:
        return 1

    def applied(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return images + uniforms.view(-1, 1, 1, 1)


def test_a_policy_of_ones_own_is_a_number_and_a_function():
    change = Compose((Flip(1.0), Brighter()))(images(), Key(0)) - images().flip(-1)
    expected = Key(0).uniform((ROWS, 2), torch.float32)[:, 1].view(-1, 1, 1, 1).expand_as(change)
    torch.testing.assert_close(change, expected)


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    x = images().cuda()
    with nothing_read():
        found = Compose((Crop(2), Crop(1, "reflect"), Affine(), Flip()))(x, Key(0))
    assert found.shape == x.shape


WANTED = r"^Augmentation needs images, one tensor of floating point \((members, )?rows, channels, height, width\)"


@pytest.mark.parametrize(
    ("inputs", "came"),
    [
        (torch.zeros(4, 9), r"Got shape \(4, 9\) of torch.float32"),
        (torch.zeros(4, 3, 3), r"Got shape \(4, 3, 3\)"),
        (torch.zeros(4, 1, 3, 3, dtype=torch.uint8), "of torch.uint8"),
        (torch.zeros(4, 1, 1, 3, 3), r"Got shape \(4, 1, 1, 3, 3\)"),
        ((torch.zeros(4, 1, 3, 3), torch.zeros(4, 1)), "Got several"),
    ],
    ids=["rows of pixels", "no channels", "bytes", "members", "two inputs"],
)
def test_inputs_that_are_no_images_are_refused(inputs, came):
    with pytest.raises(BadData, match=f"{WANTED}.*{came}.*Reshape the inputs, or leave augmentation out"):
        as_data((inputs, torch.zeros(4)), augmentation=Flip())


@pytest.mark.parametrize("augmentation", [Crop, [Crop(1), Flip()], "flip"], ids=["class", "list", "text"])
def test_what_is_no_policy_is_refused(augmentation):
    with pytest.raises(TypeError, match=r"^augmentation must be a policy such as Crop\(4\)\. Got .*(Call it|Compose)"):
        as_data((images(), labels()), augmentation=augmentation)


def test_data_without_images_and_images_too_small_are_refused():
    with pytest.raises(BadData, match="NoData has none"):
        as_data(None, augmentation=Flip())
    with pytest.raises(
        BadData, match=r"Crop\(.*needs images of at least 6 pixels each way\. Got shape .*Use less padding"
    ):
        as_data((images(), labels()), augmentation=Compose((Crop(5, "reflect"),)))
    with pytest.raises(ValueError, match=r"^There must be one key, or one for each member\. Got 2"):
        Flip()(images(), [Key(0), Key(1)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Crop(0), r"^Crop\.padding must be a positive whole number\. Got 0\.$"),
        (lambda: Crop(1.5), r"^Crop\.padding must be"),
        (lambda: Crop(2, "wrap"), r"^Crop\.mode must be 'zeros' or 'reflect'\. Got 'wrap'\.$"),
        (lambda: Affine(181.0), r"^Affine\.degrees must be from 0 to 180\. Got 181\.0\.$"),
        (lambda: Affine(zoom=1.0), r"^Affine\.zoom must be from 0 to 0\.9\. Got"),
        (lambda: Affine(shear=math.nan), r"^Affine\.shear must be"),
        (lambda: Flip(0.0), r"^Flip\.probability must be above 0 and at most 1\. Got 0\.0\.$"),
        (lambda: Flip(math.nan), r"^Flip\.probability must be"),
        (lambda: Flip(True), r"^Flip\.probability must be"),
        (lambda: Compose(()), r"^Compose\.policies must be policies such as"),
        (lambda: Compose((Crop(1), "flip")), r"^Compose\.policies must be"),
        (lambda: Compose(Crop(1)), r"^Compose\.policies must be"),
    ],
)
def test_odd_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
