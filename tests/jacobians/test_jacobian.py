"""Factored Jacobians against naive loops, and blocks of weights against their places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrixcases import FLOAT64, between, normal

from posterity.jacobians import jacobian
from posterity.jacobians.convolution import Convolution, Window
from posterity.jacobians.head import Head
from posterity.jacobians.jacobian import Explicit, Selected, Stacked, as_jacobian
from posterity.jacobians.linear import Lookup, Matrix, Thin
from posterity.numerics import Block, Key

ROWS, OUTPUTS = 5, 2


def matrix_part(seed, positions, groups, bias, features=True):
    return Matrix(
        normal(seed, "a", ROWS, positions, groups, 3) if features else None,
        normal(seed, "g", OUTPUTS, ROWS, positions, groups, 2),
        bias,
    )


def lookup_part(seed, positions):
    index = (Key(seed).uniform((ROWS, positions), FLOAT64, "cpu") * 4).long().to(torch.get_default_device())
    return Lookup(index, normal(seed, "e", OUTPUTS, ROWS, positions, 3), entries=4)


def thin_part(seed, bias, features=True):
    columns = tuple(normal(seed, f"g{d}", ROWS, 2) for d in range(OUTPUTS))
    return Thin(normal(seed, "a", ROWS, 3) if features else None, columns, bias)


def convolution_part(seed, groups, bias, images=True, stride=(2, 1), turned=False):
    """Images of 5 x 4 pixels seen by a window of 2 x 2 with a border of (1, 0), at 9 pixels or at 2."""
    window = Window((2, 2), stride, (1, 0), (1, 1), groups)
    gradients = normal(seed, "g", OUTPUTS, ROWS, groups, 2, 9 if stride == (2, 1) else 2)
    part = Convolution(normal(seed, "x", ROWS, 2 * groups, 5, 4) if images else None, gradients, window, bias)
    if not turned:
        return part
    return part.rotated(normal(seed, "o", groups, 2, 2), normal(seed, "i", groups, part.width, part.width))


def head_part(seed, bias, turned=False):
    part = Head(normal(seed, "a", ROWS, 3), bias, OUTPUTS)
    if not turned:
        return part
    width = 3 + int(bias)
    return part.rotated(normal(seed, "o", 1, OUTPUTS, OUTPUTS), normal(seed, "i", 1, width, width))


def stacked(seed, tied):
    """A layer, a table and a vector; with `tied` the table's weights are used by a layer too."""
    blocks = [Block(("w", "b"), 2, 3, weight=14, bias=0), Block(("t",), 4, 3, weight=2), Block(("v",), 1, 2, weight=20)]
    parts = [matrix_part(seed, 1, 1, True), lookup_part(seed, 3), Explicit(normal(seed, "v", ROWS, OUTPUTS, 2))]
    if tied:
        blocks.append(Block(("t",), 4, 3, weight=2))
        parts.append(Matrix(normal(seed, "x", ROWS, 2, 1, 3), normal(seed, "y", OUTPUTS, ROWS, 2, 1, 4), False))
        blocks.append(Block(("t", "v"), 2, 6, weight=2, bias=20))  # a view in another shape, overlapping two others
        parts.append(Explicit(normal(seed, "z", ROWS, OUTPUTS, 14)))
    return Stacked(tuple(blocks), tuple(parts), 23)  # no part has the last weight


JACOBIANS = {
    "explicit": lambda: Explicit(normal(0, "j", ROWS, OUTPUTS, 6)),
    "matrix": lambda: matrix_part(0, 1, 1, False),
    "matrix, bias": lambda: matrix_part(0, 1, 1, True),
    "matrix, groups": lambda: matrix_part(0, 1, 2, True),
    "matrix, positions": lambda: matrix_part(0, 3, 1, True),
    "matrix, positions, groups": lambda: matrix_part(0, 3, 2, False),
    "bias alone": lambda: matrix_part(0, 3, 1, True, features=False),
    "lookup": lambda: lookup_part(0, 1),
    "lookup, positions": lambda: lookup_part(0, 6),  # more positions than entries: some are looked up twice
    "thin": lambda: thin_part(0, False),
    "thin, bias": lambda: thin_part(0, True),
    "thin, bias alone": lambda: thin_part(0, True, features=False),
    "thin, rotated": lambda: thin_part(0, True).rotated(normal(0, "o", 1, 2, 2), normal(0, "i", 1, 4, 4)),
    "convolution": lambda: convolution_part(0, 1, True),
    "convolution, groups": lambda: convolution_part(0, 2, False),
    "convolution, bias alone": lambda: convolution_part(0, 1, True, images=False),
    "convolution, rotated": lambda: convolution_part(0, 2, True, turned=True),
    "convolution, few pixels, rotated": lambda: convolution_part(0, 2, True, stride=(4, 3), turned=True),
    "head": lambda: head_part(0, False),
    "head, bias": lambda: head_part(0, True),
    "head, rotated": lambda: head_part(0, True, turned=True),
    "stacked": lambda: stacked(0, tied=False),
    "stacked, tied": lambda: stacked(0, tied=True),
    "selected from factors": lambda: Selected(stacked(0, tied=False), torch.tensor([3, 0, 21])),
    "selected": lambda: Selected(stacked(0, tied=True), torch.tensor([3, 0, 21])),
}


def naive_matrix(part):
    """The definition, one number after the other."""
    _, _, positions, groups, out = part.gradients.shape
    dense = torch.zeros(ROWS, OUTPUTS, groups, out, part.width, dtype=FLOAT64)
    for n in range(ROWS):
        for t in range(positions):
            for g in range(groups):
                features = [] if part.features is None else list(part.features[n, t, g])
                for d in range(OUTPUTS):
                    for o in range(out):
                        for i, feature in enumerate([*features, 1.0] if part.bias else features):
                            dense[n, d, g, o, i] += part.gradients[d, n, t, g, o] * feature
    return dense.flatten(2)


@pytest.mark.parametrize("name", [name for name in JACOBIANS if name.startswith(("matrix", "bias"))])
def test_rows_of_a_matrix(name):
    part = JACOBIANS[name]()
    torch.testing.assert_close(part.rows(), naive_matrix(part), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["lookup", "lookup, positions"])
def test_rows_of_a_lookup(name):
    part = JACOBIANS[name]()
    wanted = torch.zeros(ROWS, OUTPUTS, 4, 3, dtype=FLOAT64)
    for n in range(ROWS):
        for t in range(part.index.shape[1]):
            wanted[n, :, int(part.index[n, t])] += part.gradients[:, n, t]
    torch.testing.assert_close(part.rows(), wanted.flatten(2), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_stacked_parts(tied):
    whole = stacked(1, tied)
    wanted = torch.zeros(ROWS, OUTPUTS, 23, dtype=FLOAT64)
    for block, part in zip(whole.blocks, whole.parts, strict=True):
        rows = part.rows()
        for place, index in enumerate(block.index.tolist()):
            wanted[..., index] += rows[..., place]
    torch.testing.assert_close(whole.rows(), wanted, rtol=1e-13, atol=1e-13)
    assert len(whole.pieces) == (2 if tied else 3)
    joined = torch.zeros_like(wanted)
    for places, piece in whole.pieces:
        joined[..., places.index if isinstance(places, Block) else places] += piece.rows()
    torch.testing.assert_close(joined, wanted, rtol=1e-13, atol=1e-13)
    for block in (*whole.blocks, Block(("none",), 1, 1, weight=22)):
        torch.testing.assert_close(whole.part(block).rows(), block.gather(wanted), rtol=1e-13, atol=1e-13)
    touched = whole.restricted([whole.blocks[0]]).rows()
    assert torch.equal(touched[..., whole.blocks[0].index], wanted[..., whole.blocks[0].index])
    assert float(touched[..., 2:14].abs().max()) == 0


def test_the_part_of_a_block_keeps_its_factors():
    whole = stacked(1, tied=False)
    assert all(whole.part(block) is part for block, part in zip(whole.blocks, whole.parts, strict=True))


def test_selected_columns():
    whole = stacked(0, tied=True)
    index = torch.tensor([3, 0, 21])
    assert torch.equal(Selected(whole, index).rows(), whole.rows()[..., index])


@pytest.mark.parametrize("chunk", [1, 40, 1 << 24])
@pytest.mark.parametrize("name", JACOBIANS)
def test_sums_of_squares_and_gram_matrices(name, chunk, monkeypatch):
    monkeypatch.setattr(jacobian, "CHUNK", chunk)
    monkeypatch.setattr(jacobian, "DEVICE_SHARE", 1)
    part = JACOBIANS[name]()
    rows, variance = part.rows(), between(0, "v", part.size)
    assert rows.shape == (part.num_rows, part.num_outputs, part.size) == (ROWS, OUTPUTS, part.size)
    assert part.dtype == rows.dtype
    flat = rows.flatten(0, 1)
    for got, wanted in (
        (part.squares(), rows.square().sum((0, 1))),
        (part.weighted_gram(variance), (rows * variance) @ rows.mT),
        (part.weighted_squares(variance), rows.square() @ variance),
        (part.joint_gram(variance), (flat * variance) @ flat.mT),
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    pieces = list(part.chunks())
    if not isinstance(part, Convolution):  # whose patches count, too
        assert [low for low, _ in pieces] == list(range(0, ROWS, max(1, chunk // (OUTPUTS * part.size))))
    # the rows of a lookup are sums, which a GPU adds up in another order each time
    torch.testing.assert_close(torch.cat([piece.rows() for _, piece in pieces]), rows, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("draws", [1, 7])
@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize("name", JACOBIANS)
def test_products_with_vectors(name, chunk, draws, monkeypatch):
    monkeypatch.setattr(jacobian, "CHUNK", chunk)
    monkeypatch.setattr(jacobian, "DEVICE_SHARE", 1)
    part = JACOBIANS[name]()
    vectors = normal(0, "v", draws, part.size)
    wanted = torch.einsum("ndr,sr->snd", part.rows(), vectors)
    torch.testing.assert_close(part.products(vectors), wanted, rtol=1e-12, atol=1e-12)


def test_rows_of_a_convolution():
    """Against the gradients that torch finds for the weights of its own convolution."""
    part = convolution_part(0, 2, True)
    weight, bias = normal(0, "w", 4, 2, 2, 2).requires_grad_(), normal(0, "b", 4).requires_grad_()
    out = torch.nn.functional.conv2d(part.images, weight, bias, (2, 1), (1, 0), 1, 2)
    for n in range(ROWS):
        for d in range(OUTPUTS):
            scalar = (out[n].flatten(1) * part.gradients[d, n].flatten(0, 1)).sum()
            grads = torch.autograd.grad(scalar, (weight, bias), retain_graph=True)
            wanted = torch.cat([grads[0].flatten(1), grads[1].unsqueeze(1)], 1).flatten()
            torch.testing.assert_close(part.rows()[n, d], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding", "size"), [
    ((3, 3), (1, 1), (1, 1), (6, 7)), ((3, 3), (1, 2), (1, 0), (9, 6)), ((2, 2), (1, 1), (1, 1), (5, 4)),
    ((5, 3), (1, 1), (2, 1), (10, 5)), ((5, 1), (1, 1), (3, 0), (10, 4)), ((5,), (1,), (2,), (12,)),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_the_gram_matrix_of_patches_by_lines(kernel, stride, padding, size, bias, chunk, monkeypatch):
    monkeypatch.setattr(jacobian, "CHUNK", chunk)
    window = Window(kernel, stride, padding, (1,) * len(kernel), 1)
    images = normal(0, "images", ROWS, 2, *size)
    patches = window.patches(images)
    part = Convolution(images, normal(0, "g", 1, ROWS, 1, 4, patches.shape[1]), window, bias)
    assert window.slides(size[0])
    features = (
        patches[:, :, 0] if not bias else torch.cat([patches[:, :, 0], patches.new_ones(*patches.shape[:2], 1)], -1)
    )
    wanted = torch.einsum("nti,ntj->ij", features, features) / patches.shape[1]
    torch.testing.assert_close(part.inner_gram(None)[0].triu(), wanted.triu(), rtol=1e-12, atol=1e-12)
    ones = part.inner_gram(images.new_ones(ROWS))[0]  # weighted rows take whole patches
    torch.testing.assert_close(ones.triu(), wanted.triu(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "options"), [
    ((6, 6), {"stride": (2, 1)}), ((6, 6), {"dilation": (2, 1)}), ((6, 6), {"groups": 2}),
    ((6, 6), {"padding": (0, 1)}), ((5, 6), {}),
])  # fmt: skip
def test_other_windows_take_whole_patches(size, options):
    given = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    assert not Window((3, 3), **given | options).slides(size[0])


@pytest.mark.parametrize(("stride", "kind"), [((2, 1), Explicit), ((4, 3), Matrix)])
def test_a_rotated_convolution(stride, kind):
    part, turned = (convolution_part(0, 2, True, stride=stride, turned=turned) for turned in (False, True))
    table = part.rows().view(ROWS, OUTPUTS, 2, 2, 9)
    wanted = torch.einsum("ndgoi,gop,gij->ndgpj", table, *turned.turned).flatten(2)
    torch.testing.assert_close(turned.rows(), wanted, rtol=1e-12, atol=1e-12)
    assert isinstance(turned.narrow(0, 2), kind)


def test_a_head_is_a_layer_with_unit_gradients():
    part = head_part(0, True)
    units = torch.eye(OUTPUTS, dtype=FLOAT64).unsqueeze(1).expand(OUTPUTS, ROWS, OUTPUTS)
    matrix = Matrix(part.features[:, None, None], units[:, :, None, None], True)
    torch.testing.assert_close(part.rows(), matrix.rows(), rtol=0, atol=0)
    outer, inner = normal(0, "o", 1, OUTPUTS, OUTPUTS), normal(0, "i", 1, 4, 4)
    turned = matrix.rotated(outer, inner).rotated(outer, inner)
    got = part.rotated(outer, inner).rotated(outer, inner)
    torch.testing.assert_close(got.rows(), turned.rows(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", JACOBIANS)
def test_some_rows(name):
    part = JACOBIANS[name]()
    narrow = part.narrow(1, 3)
    assert (narrow.num_rows, narrow.num_outputs, narrow.size) == (2, OUTPUTS, part.size)
    torch.testing.assert_close(narrow.rows(), part.rows()[1:3], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in JACOBIANS if name.startswith(("matrix", "bias", "thin"))])
def test_a_rotated_matrix(name):
    part = JACOBIANS[name]()
    groups, out = (1, 2) if isinstance(part, Thin) else part.gradients.shape[3:]
    width = part.size // (groups * out)
    outer, inner = normal(0, "o", groups, out, out), normal(0, "i", groups, width, width)
    table = part.rows().view(ROWS, OUTPUTS, groups, out, width)
    wanted = torch.einsum("ndgoi,gop,gij->ndgpj", table, outer, inner).flatten(2)
    torch.testing.assert_close(part.rotated(outer, inner).rows(), wanted, rtol=1e-12, atol=1e-12)


def test_a_rotated_lookup():
    part, inner = lookup_part(0, 6), normal(0, "i", 3, 3)
    wanted = (part.rows().view(ROWS, OUTPUTS, 4, 3) @ inner).flatten(2)
    torch.testing.assert_close(part.rotated(inner).rows(), wanted, rtol=1e-12, atol=1e-12)


def test_a_tensor_as_a_jacobian():
    dense = torch.ones(2, 1, 3)
    part = Explicit(dense)
    assert as_jacobian(dense).rows() is dense
    assert as_jacobian(part) is part


BLOCKS = st.builds(
    lambda rows, columns, bias, gap: Block(
        ("w",), rows, columns, None if columns == 0 else gap, gap + rows * columns + 1 if bias or columns == 0 else None
    ),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 2),
)


@given(BLOCKS, st.sampled_from([(), (3,), (2, 3)]))
@settings(deadline=None, max_examples=40)
def test_gather_and_scatter_are_indexing(block, lead):
    total = block.rows * (block.columns + 1) + 5
    vector = normal(0, "v", *lead, total)
    entries = block.gather(vector)
    assert entries.shape == (*lead, block.size)
    assert torch.equal(entries, vector[..., block.index])
    empty = torch.zeros_like(vector)
    block.scatter(entries, empty)
    wanted = torch.zeros_like(vector)
    wanted[..., block.index] = entries
    assert torch.equal(empty, wanted)


def test_the_bias_is_the_last_column():
    block = Block(("weight", "bias"), rows=2, columns=3, weight=2, bias=0)
    assert block.index.view(2, 4).tolist() == [[2, 3, 4, 0], [5, 6, 7, 1]]
    assert (block.width, block.size) == (4, 8)


def test_one_number_stays_one_number():
    number = torch.tensor(2.0).expand(9)
    entries = Block(("weight", "bias"), rows=2, columns=3, weight=2, bias=0).gather(number)
    assert entries.stride() == (0,)
    assert torch.equal(entries, torch.full((8,), 2.0))
