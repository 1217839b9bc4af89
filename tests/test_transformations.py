"""The operations under JAX's transformations: always the oracle's bits, whatever surrounds them."""

import dataclasses
import functools

import cases
import example_layer
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import origin
import pytest
import runs
from example_layer import chain_by_hand, check, example, layer, layer_and_vjp, named, placed
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_moe

EVERY = pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
CASE = example_layer.CASE
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)


@EVERY
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_shard_map_with_and_without_check_vma(implementation, check_vma):
    at = runs.setting(CASE)
    program = layer_and_vjp(lambda ids: at.plan(ids, implementation))
    check(at, jax.jit(at.shard_map(program, check_vma=check_vma))(*placed(at)))


@EVERY
def test_explicit_axes(implementation):
    at = runs.setting(CASE, axis_types=(AxisType.Explicit,) * 3)
    program = layer_and_vjp(lambda ids: at.plan(ids, implementation))
    with jax.set_mesh(at.group.mesh):
        check(at, jax.jit(at.shard_map(program))(*placed(at)))


@EVERY
def test_scan_over_checkpointed_layers(implementation):
    """Three layers with routings of their own, recomputed in the backward pass."""
    at, seeds = runs.setting(CASE), (0, 1, 2)
    ids = np.stack([example(CASE, seed).ids for seed in seeds])
    first = example()

    def program(ids, x, s, dy, ds):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
        def body(carry, ids):
            return layer(*carry, at.plan(ids, implementation)), None

        out, vjp = jax.vjp(lambda x, s: jax.lax.scan(body, (x, s), ids)[0], x, s)
        return *out, *vjp((dy, ds))

    stacked = jax.shard_map(
        program,
        mesh=at.group.mesh,
        in_specs=(P(None, *at.spec), *(at.spec,) * 4),
        out_specs=at.spec,
    )
    flat_ids = ids.reshape(len(seeds), -1, CASE.topk)
    got = jax.jit(stacked)(flat_ids, *(at.place(a) for a in first.operands[1:]))
    want = [
        chain_by_hand(*operands)
        for operands in zip(ids.swapaxes(0, 1), *first.operands[1:], strict=True)
    ]
    check(at, got, dataclasses.replace(first, **named(want)))


def _calls(text: str, operation: str) -> int:
    """Custom calls of ours in compiled HLO."""
    return text.count(f'custom_call_target="jax_moe_{operation}"')


def test_checkpoint_recomputes_the_plan():
    at = runs.setting(CASE)

    def program(ids, x, s, dy, ds, *, remat):
        def whole(x, s):
            return layer(x, s, at.plan(ids, "cpu"))

        out, vjp = jax.vjp(jax.checkpoint(whole) if remat else whole, x, s)
        return *out, *vjp((dy, ds))

    calls = {}
    for remat in (False, True):
        function = at.shard_map(functools.partial(program, remat=remat))
        compiled = jax.jit(function).lower(*placed(at)).compile()
        check(at, compiled(*placed(at)))
        calls[remat] = _calls(compiled.as_text(), "plan")
    assert calls == {False: 1, True: 2}


def test_checkpoint_around_the_shard_map():
    at = runs.setting(CASE)
    mapped = jax.checkpoint(at.shard_map(lambda ids, x, s: layer(x, s, at.plan(ids, None))))

    def program(ids, x, s, dy, ds):
        out, vjp = jax.vjp(lambda x, s: mapped(ids, x, s), x, s)
        return *out, *vjp((dy, ds))

    check(at, jax.jit(program)(*placed(at)))


def test_compiled_program_has_our_calls_and_no_collective():
    at = runs.setting(CASE)
    program = at.shard_map(layer_and_vjp(lambda ids: at.plan(ids, "cpu")))
    text = jax.jit(program).lower(*placed(at)).compile().as_text()
    assert [_calls(text, name) for name in ("plan", "dispatch", "combine")] == [1, 2, 2]
    added = [line for line in text.splitlines() for word in COLLECTIVES if f" {word}" in line]
    assert not added


def test_the_collectives_guard_sees_the_collectives_of_xla():
    at = runs.setting(CASE)
    program = at.shard_map(lambda ids: at.plan(ids, "xla").positions)
    text = jax.jit(program).lower(placed(at)[0]).compile().as_text()
    assert any(f" {word}" in text for word in COLLECTIVES)
    assert not any(_calls(text, name) for name in ("plan", "dispatch", "combine"))


def test_donated_operands():
    at = runs.setting(CASE)
    program = at.shard_map(layer_and_vjp(lambda ids: at.plan(ids, None)))
    operands = placed(at)
    check(at, jax.jit(program, donate_argnums=(1, 2, 3, 4))(*operands))
    assert all(a.is_deleted() for a in operands[1:])


def test_operands_that_are_slices():
    """Operands cut out of wider arrays, at offsets that are no multiple of 16 bytes."""
    at, given = runs.setting(CASE), example()

    def widen(a):
        return np.pad(a, [(0, 0)] * 2 + [(1, 2), (3, 2)], constant_values=99)

    def program(*wide):
        narrow = [a.reshape(CASE.virtual_ranks, -1, a.shape[-1])[:, 1:-2, 3:-2] for a in wide]
        narrow = [a.reshape(-1, a.shape[-1]) for a in narrow]
        results = layer_and_vjp(lambda ids: at.plan(ids, None))(*narrow)
        return (*results, jnp.concatenate(results[:2], axis=1)[1:])

    got = jax.jit(at.shard_map(program))(*(at.place(widen(a)) for a in given.operands))
    check(at, got[:4])


def test_two_executables_that_alternate():
    """A training and an evaluation step in flight together, on changing ids; each compiles once."""
    at = runs.setting(CASE)
    train = jax.jit(at.shard_map(layer_and_vjp(lambda ids: at.plan(ids, None))))
    evaluate = jax.jit(at.shard_map(lambda ids, x, s: layer(x, s, at.plan(ids, None))))
    seeds = (0, 1, 2) * 3
    given = [example(CASE, seed) for seed in seeds]
    operands = [placed(at, e) for e in given]
    results = [(train(*o), evaluate(*o[:3])) for o in operands]
    for expected, (trained, evaluated) in zip(given, results, strict=True):
        check(at, trained, expected)
        check(at, evaluated, expected)
    assert (train._cache_size(), evaluate._cache_size()) == (1, 1)


def test_two_plans_two_groups_and_two_payload_types_alive_at_once():
    at, ones = runs.setting(CASE), (example(CASE, 0), example(CASE, 1))
    other_case = dataclasses.replace(
        CASE, name="other axes", axes=("rank",), virtual_ranks=1, hidden=24, dtype="bfloat16",
        experts=6, capacity=9,
    )  # fmt: skip
    other, third = runs.setting(other_case), example(other_case)

    def program(first, second, third):
        plans = [at.plan(first[0], None), at.plan(second[0], None), other.plan(third[0], None)]
        operands = (first, second, third)
        sent = [jax_moe.dispatch(*o[1:], p) for o, p in zip(operands, plans, strict=True)]
        halves = jax_moe.dispatch(first[1].astype(jnp.bfloat16), first[2], plans[0])
        back = [
            jax_moe.combine(rows * rows, row_s * 3.0, p)
            for (rows, row_s), p in zip(sent[::-1], plans[::-1], strict=True)
        ]
        return back[::-1], halves

    specs = ((at.spec,) * 3, (at.spec,) * 3, (other.spec,) * 3)
    mapped = jax.shard_map(
        program,
        mesh=at.group.mesh,
        in_specs=specs,
        out_specs=([(at.spec,) * 2, (at.spec,) * 2, (other.spec,) * 2], (at.spec,) * 2),
    )
    operands = [tuple(placed(at, e)[:3]) for e in ones] + [tuple(placed(other, third)[:3])]
    back, halves = jax.jit(mapped)(*operands)
    check(at, back[0], ones[0])
    check(at, back[1], ones[1])
    check(other, back[2], third)
    p = [oracle.plan(ids, num_experts=16, capacity=9, alignment=2) for ids in ones[0].ids]
    x = ones[0].x.astype(jnp.bfloat16)
    want = np.stack([oracle.dispatch(x[g], ones[0].s[g], p[g])[0] for g in range(CASE.groups)])
    origin.assert_same_bits(at.stacked(halves[0]), want, "bfloat16 rows")


@pytest.mark.parametrize("maker", cases.IMPLEMENTATIONS)
def test_a_plan_outlives_its_program_and_serves_any_implementation(maker):
    at = runs.setting(CASE)
    user = cases.IMPLEMENTATIONS[cases.IMPLEMENTATIONS.index(maker) - 1]
    plan = jax.jit(at.shard_map(lambda ids: at.plan(ids, maker)))(placed(at)[0])

    def use(plan, x, s):
        rows, row_s = jax_moe.dispatch(x, s, plan, implementation=user)
        return jax_moe.combine(rows * rows, row_s * 3.0, plan, implementation=user)

    check(at, jax.jit(at.shard_map(use))(plan, *placed(at)[1:3]))


def test_calls_inside_cond_and_while():
    """A condition that all ranks share may hold calls, and so may a loop of unknown length."""
    at = runs.setting(CASE)

    def program(ids, x, s, rounds):
        def body(state):
            i, _ = state
            plan = at.plan(ids, None)
            swapped = jax.lax.cond(
                i[0] % 2 == 0,
                lambda x, s: layer(x, s, plan),
                lambda x, s: jax_moe.combine(*jax_moe.dispatch(x, s, plan), plan),
                x,
                s,
            )
            return i + 1, swapped

        state = jnp.zeros_like(rounds), (x * 0.0, s * 0.0)
        return jax.lax.while_loop(lambda state: state[0][0] < rounds[0], body, state)[1]

    run = jax.jit(at.shard_map(program))
    operands = placed(at)[:3]
    check(at, run(*operands, np.full(CASE.devices, 3, np.int32)))  # the last round is even


@EVERY
def test_operands_that_are_the_same_on_all_ranks(implementation):
    """Replicated operands need no cast by hand, and their gradient is the sum over all ranks."""
    case = dataclasses.replace(CASE, name="same everywhere", virtual_ranks=1, capacity=None)
    at, ids = runs.setting(case), np.array([[0, 5, 9], [-1, 15, 15], [4, 3, 2], [1, -1, -1]])
    x = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)
    ids = ids.astype(np.int32)

    def program(x):
        plan = at.plan(jnp.asarray(ids), implementation)
        y, s = jax_moe.combine(*jax_moe.dispatch(x, jnp.ones((4, 3)), plan), plan)
        return jnp.sum(y[:, :1]).reshape(1), y, s

    for check_vma in (True, False):
        mapped = jax.shard_map(
            program, mesh=at.group.mesh, in_specs=P(), out_specs=at.spec, check_vma=check_vma
        )

        def loss(x, mapped=mapped):
            parts, *results = mapped(x)
            return parts.sum(), results

        (_, (y, s)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
        times = (ids >= 0).sum(1, keepdims=True).astype(np.float32)
        np.testing.assert_array_equal(y, np.tile(x * times, (8, 1)))
        np.testing.assert_array_equal(s, np.tile(ids >= 0, (8, 1)).astype(np.float32))
        want = np.zeros_like(x)
        want[:, :1] = 8 * times
        np.testing.assert_array_equal(gradient, want)


@EVERY
def test_results_that_are_the_same_in_all_groups(implementation):
    """What only varies over the group's axes needs no reduction over the others afterwards."""
    at, given = runs.setting(CASE), example()
    inner = P(at.group.axes)

    def program(ids, x, s):
        return layer(x, s, at.plan(ids, implementation))

    mapped = jax.shard_map(program, mesh=at.group.mesh, in_specs=inner, out_specs=inner)

    def loss(x, s):
        y, s_back = mapped(ids, x, s)
        return jnp.vdot(y, dy) + jnp.vdot(s_back, ds), (y, s_back)

    ids, x, s, dy, ds = (a[0].reshape(-1, a.shape[-1]) for a in given.operands)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (x_bar, s_bar), (y, s_back) = gradient(x, s)
    for got, want in zip((y, s_back, x_bar, s_bar), given.results, strict=True):
        origin.assert_same_bits(np.asarray(got), want[0].reshape(got.shape), "result")


@EVERY
@pytest.mark.parametrize("operation", ["plan", "dispatch", "combine"])
def test_vmap_is_refused(implementation, operation):
    at = runs.setting(CASE)

    def program(ids, x, s):
        batch = functools.partial(jax.tree.map, lambda a: jnp.stack([a, a]))
        if operation == "plan":
            return jax.vmap(lambda ids: at.plan(ids, implementation))(batch(ids)).positions[0]
        plan = at.plan(ids, implementation)
        rows, row_s = jax_moe.dispatch(x, s, plan)
        if operation == "dispatch":
            return jax.vmap(lambda x, s: jax_moe.dispatch(x, s, plan))(*batch((x, s)))[0][0]
        return jax.vmap(lambda r: jax_moe.combine(r, row_s, plan))(batch(rows))[0][0]

    with pytest.raises(NotImplementedError, match=rf"jax_moe.{operation} cannot be vmapped"):
        jax.jit(at.shard_map(program)).lower(*placed(at)[:3])


@pytest.mark.parametrize("batched", ["plan", "scalars"])
def test_vmap_is_refused_whatever_is_batched(batched):
    at = runs.setting(CASE)

    def program(ids, x, s):
        if batched == "plan":
            plans = jax.tree.map(lambda a: jnp.stack([a, a]), at.plan(ids, None))
            return jax.vmap(lambda p: jax_moe.dispatch(x, s, p))(plans)[0][0]
        plan = at.plan(ids, None)
        return jax.vmap(lambda s: jax_moe.dispatch(x, s, plan))(jnp.stack([s, s]))[0][0]

    with pytest.raises(NotImplementedError, match="cannot be vmapped"):
        jax.jit(at.shard_map(program)).lower(*placed(at)[:3])


def test_vmap_of_the_gradient_is_refused():
    """jax.jacrev would batch the backward pass."""
    at = runs.setting(CASE)

    def program(ids, x, s):
        plan = at.plan(ids, None)
        rows, vjp = jax.vjp(lambda x: jax_moe.dispatch(x, s, plan)[0], x)
        return jax.vmap(vjp)(jnp.stack([rows, rows]))[0][0]

    with pytest.raises(NotImplementedError, match=r"jax_moe.combine cannot be vmapped"):
        jax.jit(at.shard_map(program)).lower(*placed(at)[:3])


@EVERY
def test_debug_nans_stays_quiet_with_a_zero_tail(implementation):
    """Nothing uninitialised comes out, though the memory that results come to use is NaN."""
    at = runs.setting(CASE)

    def program(ids, x, s, dy, ds):
        plan = at.plan(ids, implementation)
        rows, row_s = jax_moe.dispatch(x, s, plan)
        _, vjp = jax.vjp(lambda r, rs: jax_moe.combine(r, rs, plan), rows, row_s)
        return rows, row_s, *vjp((dy, ds))

    function = runs.poisoned(at.shard_map(program))
    poison, operands = runs.poison(at, 2), placed(at)
    with jax.debug_nans(True):
        out = jax.block_until_ready(function(poison, *operands))
    assert all(np.isfinite(np.asarray(a)).all() for a in out)
