"""Batch-norm statistics in the state of a method."""

import dataclasses

from torch import Tensor

from posterity.inference.method import Target
from posterity.model.joint import Joint
from posterity.model.network import Buffers


def starting_buffers(joint: Target, theta: Tensor) -> Buffers:
    """Copies of the network's buffers, one for each member where theta (M, P) has members; none for a Density."""
    if not isinstance(joint, Joint):
        return {}
    plain = joint.network.member(0).buffers
    lead = theta.shape[:-1]
    return {
        name: (b if b.dim() > plain[name].dim() else b.expand((*lead, *b.shape))).clone()
        for name, b in joint.network.buffers.items()
    }


def with_buffers(joint: Joint, buffers: Buffers) -> Joint:
    """The joint whose network has these batch-norm statistics, those of a fit; itself where there are none."""
    return dataclasses.replace(joint, network=joint.network.replace(buffers=buffers)) if buffers else joint
