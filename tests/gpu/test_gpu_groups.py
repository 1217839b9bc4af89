"""Several groups and several programs at a time."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import on_gpus
import oracle
import origin
import runs

import jax_moe


def _case(name: str, **changes) -> cases.Case:
    sizes = dict(tokens=16, experts=16, topk=3, hidden=64, virtual_ranks=4)
    return cases.Case(name, **sizes | changes)


def _chain(case: cases.Case):
    at = on_gpus.setting(case)

    def program(ids, x, s):
        plan = at.plan(ids, "ptx")
        return jax_moe.combine(*jax_moe.dispatch(x, s, plan), plan)

    return program


def _operands(case: cases.Case):
    at, given = on_gpus.setting(case), runs.inputs(case)
    return tuple(map(at.place, (given.ids, given.x, given.s)))


def _expected(case: cases.Case):
    given, (p,) = runs.inputs(case), runs.plans(case)
    return oracle.combine(*oracle.dispatch(given.x[0], given.s[0], p), p, num_nodes=case.nodes)


def _check(case: cases.Case, got) -> None:
    for what, x, y in zip(("y", "s"), got, _expected(case), strict=True):
        origin.assert_same_bits(np.asarray(x).reshape(y.shape), y, f"{case} {what}")


def test_two_groups_in_one_program():
    one = _case("two_groups_1")
    two = _case("two_groups_2", virtual_ranks=8, hidden=128, dtype="bfloat16", num_nodes=2)
    assert on_gpus.setting(one).group.key != on_gpus.setting(two).group.key
    mapped = on_gpus.setting(one).shard_map(lambda a, b: (_chain(one)(*a), _chain(two)(*b)))
    function = jax.jit(mapped)
    for _ in range(5):
        first, second = function(_operands(one), _operands(two))
        _check(one, first)
        _check(two, second)


def test_programs_of_one_group_take_turns():
    """As training and evaluation do, with other sizes and another payload type each."""
    group_cases = [
        _case("turns_train", tokens=48),
        _case("turns_eval", tokens=5, dtype="bfloat16"),
        _case("turns_other", tokens=31, hidden=256, topk=5),
    ]
    functions = [jax.jit(on_gpus.setting(c).shard_map(_chain(c))) for c in group_cases]
    operands = [_operands(c) for c in group_cases]
    for _ in range(10):
        results = [f(*given) for f, given in zip(functions, operands, strict=True)]
        for case, got in zip(group_cases, results, strict=True):
            _check(case, got)


def test_under_remat_and_scan():
    case = _case("remat_scan")
    at, chain = on_gpus.setting(case), _chain(case)

    def loss(ids, x, s, remat):
        def layer(x, _):
            y, back = chain(ids, x, s)
            return jnp.tanh(y) + x, back.sum()

        body = jax.checkpoint(layer) if remat else layer
        x, scalars = jax.lax.scan(body, x, length=3)
        return (x**2).sum() + scalars.sum()

    def program(ids, x, s):
        return [jax.grad(loss, argnums=(1, 2))(ids, x, s, remat) for remat in (False, True)]

    plain, remat = jax.jit(at.shard_map(program))(*_operands(case))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
        assert np.isfinite(np.asarray(a)).all()


def test_waits_grow():
    """Receivers wait for data when there is much of it (little arrives within the first polls)."""
    case = _case("waits", tokens=2048, hidden=4096, topk=8, virtual_ranks=8)
    at = on_gpus.setting(case)
    leading = case.ranks * case.tokens
    ids = np.arange(leading * case.topk, dtype=np.int32).reshape(leading, -1) % case.experts
    s = np.ones((leading, case.topk), np.float32)
    x = np.ones((leading, case.hidden), np.float32)
    function = jax.jit(at.shard_map(_chain(case)))
    y, _ = function(*jax.device_put((ids, x, s), jax.NamedSharding(at.group.mesh, at.spec)))
    assert (np.asarray(y)[::97] == case.topk).all()
    waited = at.group.waits()
    assert all(array.shape == (1, 8, 8) and (array >= 0).all() for array in waited.values())
    assert waited["dispatch"].sum() > 0
    at.group.close()  # gives its memory back
