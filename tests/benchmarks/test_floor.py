"""The multiply-adds of curvature passes, against numbers worked out by hand."""

import pytest
import torch
from benchmarkfiles import load
from torch import nn

from posterity.networks import MLP, LeNet, ResNet

floor = load("floor")
LINEAR = [floor.Shape(2, 3), floor.Shape(3, 4, bias=False)]
CONV = [floor.Shape(2, 3, positions=5), floor.Shape(7, 2)]


def test_an_epoch_is_forward_weights_and_inputs_of_all_layers_but_the_first():
    assert floor.forward(LINEAR) == 6 + 12
    assert floor.column(LINEAR) == 12
    assert floor.epoch(LINEAR) == 18 + 18 + 12


def test_kronecker_factors_are_half_products_with_the_bias_among_the_inputs():
    inputs = 3 * 4 // 2 + 3 * 4 // 2  # (2 + bias), then 3 without one
    outputs = 3 * 4 // 2 + 4 * 5 // 2
    assert floor.kronecker(LINEAR, columns=1) == 18 + 12 + inputs + outputs
    assert floor.kronecker(LINEAR, columns=7) == 18 + 7 * 12 + inputs + 7 * outputs
    assert floor.kronecker(CONV, columns=2) == (30 + 14) + 2 * 14 + (5 * 6 + 36) + 2 * (5 * 6 + 3)


def test_squares_factor_over_columns_where_there_is_one_position():
    assert floor.diagonal(LINEAR, columns=1) == 18 + 12 + 18 == floor.epoch(LINEAR)
    assert floor.diagonal(LINEAR, columns=7) == 18 + 7 * 12 + 18


def test_squares_of_a_convolution_are_taken_row_by_row_and_column_by_column():
    assert floor.diagonal(CONV, columns=1) == 44 + 14 + (30 + 6) + 14
    assert floor.diagonal(CONV, columns=3) == 44 + 3 * 14 + 3 * (30 + 6) + 14


def test_the_last_layer_needs_no_column():
    assert floor.last_layer_kronecker(LINEAR) == 18 + 3 * 4 // 2 + 4 * 5 // 2


def test_shapes_of_an_mlp():
    found = floor.shapes(MLP((784, 400, 400, 10)), torch.zeros(1, 784))
    assert found == [floor.Shape(784, 400), floor.Shape(400, 400), floor.Shape(400, 10)]
    # 784 * 400 + 400 * 400 + 400 * 10, twice, and once more without the first
    assert floor.epoch(found) == 2 * 477_600 + 164_000
    # inputs 785 * 786 / 2 + 2 * 401 * 402 / 2; outputs 2 * 400 * 401 / 2 + 10 * 11 / 2, for 9 columns
    assert floor.kronecker(found, columns=9) == 477_600 + 9 * 164_000 + 469_707 + 9 * 160_455
    assert floor.last_layer_kronecker(found) == 477_600 + 80_601 + 55


def test_shapes_of_lenet():
    found = floor.shapes(LeNet(), torch.zeros(1, 1, 28, 28))
    assert found == [
        floor.Shape(25, 6, 28 * 28),
        floor.Shape(6 * 25, 16, 10 * 10),
        floor.Shape(400, 120),
        floor.Shape(120, 84),
        floor.Shape(84, 10),
    ]


def test_shapes_of_a_resnet_follow_strides_and_have_no_bias_in_convolutions():
    net = ResNet()
    found = floor.shapes(net, torch.zeros(1, 3, 32, 32))
    assert len(found) == 20
    assert found[0] == floor.Shape(27, 16, 1024, bias=False)
    assert found[7:9] == [floor.Shape(144, 32, 256, bias=False), floor.Shape(288, 32, 256, bias=False)]
    assert found[-1] == floor.Shape(64, 10)
    assert floor.forward(found) == 40_551_040  # the 41 million of the usual tables
    assert not any(layer._forward_hooks for layer in net.modules())


def test_groups_are_refused():
    with pytest.raises(ValueError, match="one group"):
        floor.shapes(nn.Conv2d(4, 4, 3, groups=2), torch.zeros(1, 4, 5, 5))
