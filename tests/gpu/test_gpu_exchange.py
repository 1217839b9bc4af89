"""plan, dispatch, combine and both VJPs on the GPUs here: every case of the suite, every bit."""

import dataclasses

import cases
import jax
import numpy as np
import on_gpus
import origin
import pytest
import runs

import jax_moe

CASES = [*(on_gpus.on_gpus(case) for case in cases.CASES), *on_gpus.LARGER]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_bit(case):
    on_gpus.check(case, runs.run(case, "ptx"))
    on_gpus.setting(case).group.check()


def _run_with(case: cases.Case, implementation: str = "ptx", **changes) -> dict:
    """As `runs.run`, with changes to the group."""
    at = on_gpus.setting(case)
    at = dataclasses.replace(at, group=dataclasses.replace(at.group, **changes))
    operands = [
        at.place(getattr(runs.inputs(case), f.name)) for f in dataclasses.fields(runs.Inputs)
    ]
    function = jax.jit(at.shard_map(runs.everything(at, implementation)))
    return jax.tree.map(at.stacked, jax.block_until_ready(function(*operands)))


@pytest.mark.parametrize("name", ["many_tokens", "many_tokens_overflow"])
@pytest.mark.parametrize("sms", [(8, None), (24, 8), (131, 16)], ids=str)
def test_same_bits_at_every_sm_count(name, sms):
    case = next(case for case in CASES if case.name == name)
    on_gpus.check(case, _run_with(case, num_sms=sms[0], link_sms=sms[1]))


def test_ptx_is_the_default_and_its_tail_is_undefined():
    group = jax_moe.ExpertGroup(jax_moe.make_mesh(devices=jax.devices()[:1]), virtual_ranks=2)
    spec = jax.P(group.mesh.axis_names)
    plan = jax.shard_map(
        lambda ids: jax_moe.plan(ids, group=group, num_experts=4),
        mesh=group.mesh,
        in_specs=spec,
        out_specs=spec,
    )(np.zeros((4, 1), np.int32))
    assert plan.spec.implementation == "ptx"
    assert plan.spec.tail == "undefined"


def test_fewer_blocks_than_virtual_ranks_is_refused():
    case = next(case for case in CASES if case.name == "many_tokens")
    virtual = on_gpus.setting(case).group.virtual_ranks
    with pytest.raises(ValueError, match=f"num_sms={virtual - 1} .*{virtual} virtual ranks"):
        _run_with(case, num_sms=virtual - 1)


@pytest.mark.parametrize("name", ["virtual8_nodes_2", "special_nodes", "aligned_8"])
def test_the_other_implementations_agree_on_a_gpu(name):
    """xla on the GPU gives the oracle's bits too, subnormals included."""
    case = next(case for case in CASES if case.name == name)
    got = _run_with(case, "xla")
    ours = runs.run(case, "ptx")
    for field in (*runs.PLAN_FIELDS, "combine"):
        for a, b in zip(jax.tree.leaves(got[field]), jax.tree.leaves(ours[field]), strict=True):
            origin.assert_same_bits(a, b, field)
