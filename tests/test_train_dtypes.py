"""What is float32 in a step that computes in bfloat16: read off the traced step, backward pass too.

The sizes are such that a width tells what an array is.
"""

import functools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
import toy
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from train import model
from train.step import Trainer

pytestmark = pytest.mark.cpu

EXPERTS = 72
CONFIG = toy.changed(
    toy.CONFIG,
    model__dtype="bfloat16",
    model__num_experts=EXPERTS,
    optimizer__aux_loss_weight=1e-3,
    micro_batches=2,
)
# Arithmetic that may be rounded to bfloat16: products, the residual stream, rotation's result,
# the dense MLPs' activation. No exponential, root, division, and no sum of more than two.
ROUNDED = {"dot_general", "add", "add_any", "sub", "mul", "logistic", "neg"}
MOVES = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "dynamic_update_slice",
    "ffi_call",  # plan, dispatch, combine: they add in float32
    "gather",
    "jax_moe_check_later",
    "name",
    "optimization_barrier",
    "pvary",
    "reshape",
    "reshard",
    "select_n",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "transpose",
}


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Those without others in them, at any depth."""
    for equation in jaxpr.eqns:
        inner = [
            leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf
            for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, Jaxpr))
            if isinstance(leaf, ClosedJaxpr | Jaxpr)
        ]
        if not inner or equation.primitive.name == "scatter-add":
            yield equation
        for each in inner:
            yield from equations(each)


@functools.cache
def step() -> tuple[list[JaxprEqn], Trainer]:
    trainer = Trainer(CONFIG, toy.group("1 device, 8 virtual ranks"))
    # The look-up of a small vocabulary is a matmul in float32, for its gradient's sake.
    with mock.patch.object(model, "SMALL_VOCABULARY", 0):
        traced = trainer.step.trace(trainer.abstract_state, trainer.abstract_batch)
    return list(equations(traced.jaxpr.jaxpr)), trainer


def avals(equation: JaxprEqn) -> list:
    return [v.aval for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "dtype")]


def is_rounded(aval) -> bool:
    return aval.dtype == jnp.bfloat16


def test_only_products_and_activations_are_rounded():
    rounded = {e.primitive.name for e in step()[0] if any(map(is_rounded, avals(e)))}
    assert rounded - MOVES <= ROUNDED, rounded - MOVES - ROUNDED
    assert "dot_general" in rounded
    found = {e.primitive.name for e in step()[0]}
    # Softmax and loss, norms: they are there, and so in float32.
    assert {"exp", "log", "rsqrt", "reduce_sum", "reduce_max"} <= found


def test_the_gate_is_float32():
    """Scores of a token for all experts, their products and what is made of them."""
    scores = [
        equation
        for equation in step()[0]
        if any(a.shape[-1:] == (EXPERTS,) and a.ndim > 1 for a in avals(equation))
    ]
    assert not [e for e in scores if any(map(is_rounded, avals(e)))]
    assert {"dot_general", "logistic", "top_k"} <= {e.primitive.name for e in scores}


def test_matrices_are_multiplied_in_bfloat16():
    """But for the gate's, and the sums of squares in the gradient's norm."""
    for equation in step()[0]:
        if equation.primitive.name == "dot_general" and equation.outvars[0].aval.ndim > 1:
            operands = [v.aval for v in equation.invars]
            is_gate = any(EXPERTS in a.shape for a in (*operands, equation.outvars[0].aval))
            assert all(map(is_rounded, operands)) != is_gate, equation


def test_masters_are_float32():
    state = step()[1].abstract_state
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floats) == 3 * len(state.params) + len(state.biases)
    assert {leaf.dtype for leaf in floats} == {jnp.dtype(jnp.float32)}
