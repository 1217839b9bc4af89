"""route() against a restatement in plain loops, its gradient against float64 differences."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe._router import RouterConfig, route

routed = jax.jit(route, static_argnums=2)
V3 = RouterConfig.deepseek_v3()
CONFIGS = {
    "v3": V3,
    "one_expert": RouterConfig(1, 1),
    "unlimited": RouterConfig(16, 4),
    "all_chosen": RouterConfig(6, 6, scale=0.5),
    "odd": RouterConfig(15, 3, num_groups=5, top_groups=2, group_score_top=3),
    "groups_of_one": RouterConfig(7, 2, num_groups=7, top_groups=3, group_score_top=1),
    "exact_fit": RouterConfig(12, 6, num_groups=4, top_groups=2),
    "softmax": RouterConfig(16, 4, score="softmax"),
    "softmax_groups": RouterConfig(24, 5, num_groups=6, top_groups=2, score="softmax", scale=3.0),
    "plain_sigmoid": RouterConfig(16, 4, normalize=False, scale=2.0),
    "plain_softmax": RouterConfig(16, 4, score="softmax", normalize=False),
}


def restated_ids(scores, bias, config):
    """The expert ids of one token, by Python's own stable sort."""
    biased = [float(np.float32(s) + np.float32(b)) for s, b in zip(scores, bias, strict=True)]
    size = config.num_experts // (config.num_groups or 1)
    groups = [range(first, first + size) for first in range(0, config.num_experts, size)]

    def group_score(group):
        total = np.float32(0)
        for value in sorted((biased[e] for e in group), reverse=True)[: config.group_score_top]:
            total = np.float32(total + np.float32(value))
        return float(total)

    best = sorted(range(len(groups)), key=lambda g: -group_score(groups[g]))
    allowed = sorted(e for g in best[: config.top_groups or 1] for e in groups[g])
    return sorted(allowed, key=lambda e: -biased[e])[: config.top_k]


def restated_scores(logits, config):
    """float64 scores [E] of one token."""
    logits = np.asarray(logits, np.float64)
    if config.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exps = np.exp(logits - logits.max())
    return exps / exps.sum()


def restated_weights(logits, ids, config):
    """float64 weights [K] of one token, by plain division."""
    chosen = restated_scores(logits, config)[ids]
    return config.scale * chosen / (chosen.sum() if config.normalize else 1.0)


def make_logits(kind, tokens, experts, rng):
    if kind == "normal":
        return rng.normal(size=(tokens, experts))
    if kind == "ties":  # few distinct values: most groups and experts tie somewhere
        return rng.integers(-1, 2, size=(tokens, experts))
    return np.zeros((tokens, experts))  # "equal"


def make_bias(kind, experts, rng):
    if kind == "none":
        return None
    if kind == "steps":
        return (rng.integers(-2, 3, size=experts) * 0.25).astype(np.float32)
    return rng.choice(np.float32([-1e9, 0.0, 1e9]), size=experts)  # "huge"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
@pytest.mark.parametrize("bias_kind", ["none", "steps", "huge"])
def test_matches_the_restatement(name, kind, bias_kind):
    config = CONFIGS[name]
    rng = np.random.default_rng([len(name), len(kind), len(bias_kind)])
    logits = make_logits(kind, 40, config.num_experts, rng).astype(np.float32)
    bias = make_bias(bias_kind, config.num_experts, rng)
    ids, weights, scores = map(np.asarray, routed(logits, bias, config))
    assert ids.dtype == np.int32 and weights.dtype == scores.dtype == np.float32
    zero = np.zeros(config.num_experts, np.float32)
    for token in range(len(logits)):
        expected = restated_scores(logits[token], config)
        np.testing.assert_allclose(scores[token], expected, rtol=2e-6)
        chosen = restated_ids(scores[token], zero if bias is None else bias, config)
        assert ids[token].tolist() == chosen, (token, logits[token], bias)
        expected = restated_weights(logits[token], chosen, config)
        np.testing.assert_allclose(weights[token], expected, rtol=4e-6)


@pytest.mark.parametrize("seed", range(12))
def test_random_configs_keep_the_limits(seed):
    rng = np.random.default_rng(seed)
    num_groups, size = (int(n) for n in rng.integers(1, 9, size=2))
    top_groups = int(rng.integers(1, num_groups + 1))
    config = RouterConfig(
        num_experts=num_groups * size,
        top_k=int(rng.integers(1, top_groups * size + 1)),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score_top=int(rng.integers(1, size + 1)),
        score=("sigmoid", "softmax")[seed % 2],
    )
    logits = rng.normal(size=(64, config.num_experts)).astype(np.float32) * 10.0 ** (seed % 5)
    bias = make_bias(("steps", "huge")[seed // 2 % 2], config.num_experts, rng)
    routing = routed(jnp.asarray(logits), jnp.asarray(bias), config)
    scores, ids = np.asarray(routing.scores), np.asarray(routing.expert_ids)
    for token in range(len(ids)):
        assert ids[token].tolist() == restated_ids(scores[token], bias, config)
        assert len(set(ids[token].tolist())) == config.top_k
        assert len(set((ids[token] // size).tolist())) <= top_groups


def test_a_token_touches_at_most_the_kept_groups_nodes():
    logits = jax.random.normal(jax.random.key(0), (512, 256)) * 3
    routing = routed(logits, None, V3)
    for num_nodes in (1, 2, 4, 8):
        V3.check_nodes(num_nodes)
        nodes = np.asarray(routing.expert_ids) // (256 // num_nodes)
        touched = [len(set(row)) for row in nodes.tolist()]
        assert max(touched) <= min(4, num_nodes)
    assert max(touched) == 4  # the limit is reached, so it is a limit


def test_known_routing():
    config = RouterConfig(8, 3, num_groups=4, top_groups=2, scale=2.0)
    odds = np.float32([1, 1, 9, 0.5, 3, 3, 4, 1 / 9])  # sigmoid(log(odds)) = odds / (1 + odds)
    routing = routed(jnp.log(odds)[None], None, config)
    # Group scores 1, 1.233, 1.5, 0.9: groups 1 and 2; experts 2 (0.9), 4 and 5 (0.75 each).
    assert routing.expert_ids.tolist() == [[2, 4, 5]]
    np.testing.assert_allclose(routing.weights[0], [0.75, 0.625, 0.625], rtol=1e-6)
    bias = jnp.zeros(8).at[7].set(1.0)  # now group 3 (1.9) leads; weights stay unbiased
    routing = routed(jnp.log(odds)[None], bias, config)
    assert routing.expert_ids.tolist() == [[7, 6, 4]]
    np.testing.assert_allclose(routing.weights[0], np.array([0.1, 0.8, 0.75]) / 0.825, rtol=1e-6)


@pytest.mark.parametrize("low", [-1e9, -3e38, -jnp.inf])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_low_bias_in_a_kept_group_never_reaches_a_masked_group(low, score):
    config = RouterConfig(8, 3, num_groups=4, top_groups=2, group_score_top=1, score=score)
    bias = jnp.array([5, low, low, low, 5, low, 0, 0])  # groups 0 and 2 win by one expert each
    logits = jnp.linspace(-1, 1, 16).reshape(2, 8)
    ids = routed(logits, bias, config).expert_ids
    assert np.all(np.isin(ids, [0, 1, 4, 5]))
    assert all(len(set(row)) == 3 for row in ids.tolist())
    everything_low = routed(logits, jnp.full(8, low), config).expert_ids
    assert all(len(set(row)) == 3 for row in everything_low.tolist())
    assert all(len({e // 2 for e in row}) == 2 for row in everything_low.tolist())


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_nan_and_infinite_inputs_keep_ids_distinct_and_in_range(score):
    config = RouterConfig(8, 4, num_groups=4, top_groups=2, score=score)
    rows = itertools.product([jnp.nan, jnp.inf, -jnp.inf, 0.0], repeat=3)
    logits = jnp.array([list(row) + [0.5, -0.5, 0, 1, 2] for row in rows] + [[jnp.nan] * 8])
    for bias in (None, logits[1], jnp.full(8, jnp.nan)):
        routing = routed(logits, bias, config)
        ids = np.asarray(routing.expert_ids)
        assert ids.min() >= 0 and ids.max() < 8
        assert all(len(set(row)) == 4 for row in ids.tolist())
        assert all(len({e // 2 for e in row}) == 2 for row in ids.tolist())
    assert np.isnan(routing.scores[-1]).all() and np.isnan(routing.weights[-1]).all()


def test_a_nan_logit_ranks_last():
    logits = jnp.array([[jnp.nan, 3.0, -50.0, 1.0]])
    assert routed(logits, None, RouterConfig(4, 4)).expert_ids.tolist() == [[1, 3, 2, 0]]


@pytest.mark.parametrize("name", ["v3", "softmax_groups", "odd", "plain_sigmoid", "plain_softmax"])
def test_gradient_matches_float64_differences(name):
    config = CONFIGS[name]
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(3, config.num_experts)).astype(np.float32) * 4
    cotangent = rng.normal(size=(3, config.top_k)).astype(np.float32)
    ids = np.asarray(routed(jnp.asarray(logits), None, config).expert_ids)
    gradient = jax.grad(lambda v: jnp.vdot(routed(v, None, config).weights, cotangent))(logits)
    gradient = np.asarray(gradient)

    def loss(token, values):
        weights = restated_weights(values, ids[token].tolist(), config)
        return float(np.dot(weights, cotangent[token].astype(np.float64)))

    step = 1e-5
    for token, expert in itertools.product(range(3), range(config.num_experts)):
        high, low = logits[token].astype(np.float64), logits[token].astype(np.float64)
        high[expert] += step
        low[expert] -= step
        difference = (loss(token, high) - loss(token, low)) / (2 * step)
        np.testing.assert_allclose(gradient[token, expert], difference, rtol=2e-5, atol=2e-6)


def test_scores_have_their_own_gradient():
    logits = jnp.array([[0.0, 2.0, -1.0, 0.5]])
    gradient = jax.grad(lambda v: routed(v, None, RouterConfig(4, 1)).scores.sum())(logits)
    scores = jax.nn.sigmoid(logits)
    np.testing.assert_allclose(gradient, scores * (1 - scores), rtol=1e-6)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_is_finite_for_any_finite_logits(score, normalize):
    config = RouterConfig(8, 4, 4, 2, score=score, normalize=normalize, scale=2.5)
    biggest = float(jnp.finfo(jnp.float32).max)
    extremes = [-biggest, -1e4, -100.0, 0.0, 100.0, 1e4, biggest]
    rows = [[value] * 8 for value in extremes]
    rows += [[low, high] * 4 for low, high in itertools.permutations(extremes, 2)]
    rows += [list(extremes) + [1.0]]
    cotangent = jnp.arange(1.0, 5.0)
    gradient = jax.grad(lambda v: (routed(v, None, config).weights * cotangent).sum())(
        jnp.array(rows)
    )
    assert np.isfinite(gradient).all()
    weights = routed(jnp.array(rows), None, config).weights
    assert np.isfinite(weights).all()
    if normalize:
        np.testing.assert_allclose(weights.sum(-1), 2.5, rtol=1e-6)


@pytest.mark.parametrize("level", [-100.0, -1e4, 0.0])
def test_equal_chosen_logits_share_evenly_with_the_closed_form_gradient(level):
    config = RouterConfig(6, 4, scale=2.0)
    logits = jnp.full((1, 6), level)
    np.testing.assert_allclose(routed(logits, None, config).weights, 0.5, rtol=1e-6)
    gradient = jax.grad(lambda v: routed(v, None, config).weights[0, 0])(logits)
    # w_i = 2 s_i / sum(s), s = sigmoid: dw_0/dv_j = (2/4) (delta_0j - 1/4) (1 - s_j).
    slope = 0.5 * (1 - 1 / (1 + math.exp(-level))) if level > -700 else 0.5
    expected = slope * np.array([[0.75, -0.25, -0.25, -0.25, 0, 0]])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_bias_chooses_but_has_no_gradient():
    logits = jax.random.normal(jax.random.key(1), (5, 16))
    bias = jnp.linspace(-0.5, 0.5, 16)

    def loss(bias):
        routing = routed(logits, bias, CONFIGS["unlimited"])
        return (routing.weights * jnp.arange(4.0)).sum() + routing.scores.sum()

    assert not np.any(jax.grad(loss)(bias))
    without, with_bias = (routed(logits, b, CONFIGS["unlimited"]) for b in (None, bias))
    assert np.any(without.expert_ids != with_bias.expert_ids)
    np.testing.assert_array_equal(without.scores, with_bias.scores)


def test_a_choice_made_elsewhere_is_only_weighed():
    config, rng = CONFIGS["unlimited"], np.random.default_rng(5)
    logits = rng.normal(size=(6, 16)).astype(np.float32)
    chosen = route(logits, None, config)
    again = route(logits, np.ones(16, np.float32), config, expert_ids=chosen.expert_ids)
    for ours, theirs in zip(again, chosen, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    others = jnp.tile(jnp.arange(4, dtype=jnp.int32), (6, 1))
    weights = jax.nn.sigmoid(logits[:, :4])
    weights = config.scale * weights / weights.sum(axis=1, keepdims=True)
    found = route(logits, None, config, expert_ids=others)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
    with pytest.raises(ValueError, match=r"expert_ids is int32\[6, 3\]: it must be int32\[6, 4\]"):
        route(logits, None, config, expert_ids=others[:, :3])


def test_leading_dimensions_vmap_and_jit_agree():
    logits = jax.random.normal(jax.random.key(2), (2, 3, 256))
    bias = jax.random.normal(jax.random.key(3), (256,)) * 0.1
    whole = routed(logits, bias, V3)
    assert whole.expert_ids.shape == (2, 3, 8) and whole.scores.shape == (2, 3, 256)
    batched = jax.jit(jax.vmap(lambda v: route(v, bias, V3)))
    for other in (batched(logits), route(logits, bias, V3)):
        np.testing.assert_array_equal(whole.expert_ids, other.expert_ids)
        np.testing.assert_allclose(whole.weights, other.weights, rtol=1e-6)
    single = routed(logits[1, 2], bias, V3)
    np.testing.assert_array_equal(single.expert_ids, whole.expert_ids[1, 2])
    assert routed(logits[:, :0], bias, V3).weights.shape == (2, 0, 8)


def test_bfloat16_logits_are_upcast_first():
    logits = jax.random.normal(jax.random.key(4), (9, 16)).astype(jnp.bfloat16)
    half = routed(logits, None, CONFIGS["unlimited"])
    full = routed(logits.astype(jnp.float32), None, CONFIGS["unlimited"])
    for a, b in zip(half, full, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_resolve_sets_one_group_per_node_once():
    config = RouterConfig(64, 8)
    assert (config.num_groups, config.top_groups) == (None, None)
    for num_nodes, kept in ((1, 1), (2, 2), (4, 4), (8, 4), (16, 4)):
        resolved = config.resolve(num_nodes)
        assert (resolved.num_groups, resolved.top_groups) == (num_nodes, kept)
    resolved = config.resolve(8)
    assert resolved.resolve(4) is resolved  # set once: another mesh does not re-derive it
    with pytest.raises(ValueError, match="num_groups=8 is not a multiple of num_nodes=3"):
        resolved.resolve(3)
    RouterConfig(64, 8, num_groups=1).check_nodes(3)  # unlimited routing runs anywhere
    config.check_nodes(5)
    with pytest.raises(ValueError, match="top_k=8 is more than the 4 experts"):
        RouterConfig(16, 8, group_score_top=1).resolve(16)


def test_config_is_static_and_comparable():
    assert hash(V3) == hash(RouterConfig.deepseek_v3()) and RouterConfig.deepseek_v3() == V3
    assert (V3.num_experts, V3.top_k, V3.num_groups, V3.top_groups) == (256, 8, 8, 4)
    assert (V3.group_score_top, V3.score, V3.normalize, V3.scale) == (2, "sigmoid", True, 2.5)
    assert RouterConfig(np.int64(8), np.int32(2)) == RouterConfig(8, 2)  # NumPy counts are fine
    assert RouterConfig(8, 2, num_groups=1) == RouterConfig(8, 2, num_groups=1, top_groups=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        V3.top_k = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_experts=0, top_k=1), "num_experts=0: must be at least 1"),
        (dict(num_experts=4, top_k=0), "top_k=0: must be at least 1"),
        (dict(num_experts=4, top_k=5), "top_k=5 is more than num_experts=4"),
        (dict(num_experts=8, top_k=2, num_groups=3, top_groups=1), "must divide num_experts=8"),
        (dict(num_experts=8, top_k=2, num_groups=4), "num_groups=4 needs top_groups"),
        (dict(num_experts=8, top_k=2, top_groups=2), "top_groups=2 was given without num_groups"),
        (dict(num_experts=8, top_k=2, num_groups=2, top_groups=3), "top_groups=3 is more than"),
        (dict(num_experts=8, top_k=5, num_groups=4, top_groups=2), "top_k=5 is more than the 4"),
        (dict(num_experts=8, top_k=2, num_groups=8, top_groups=2), "group_score_top=2 is more"),
        (dict(num_experts=8, top_k=2, group_score_top=0), "group_score_top=0: must be"),
        (dict(num_experts=8, top_k=2, score="tanh"), "score='tanh' is unknown"),
        (dict(num_experts=8, top_k=2, scale=0.0), "scale=0.0 must be finite and positive"),
        (dict(num_experts=8, top_k=2, scale=float("nan")), "scale=nan must be finite"),
    ],
)
def test_contradictory_configs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**arguments)


def test_wrong_types_and_shapes_are_refused():
    for arguments in (dict(num_experts=8.0, top_k=2), dict(num_experts=8, top_k=True)):
        with pytest.raises(TypeError, match="must be an integer"):
            RouterConfig(**arguments)
    with pytest.raises(TypeError, match="floating-point"):
        routed(jnp.zeros((2, 8), jnp.int32), None, RouterConfig(8, 2))
    with pytest.raises(ValueError, match="last axis must be num_experts=8"):
        routed(jnp.zeros((2, 4)), None, RouterConfig(8, 2))
    with pytest.raises(ValueError, match="bias has shape"):
        routed(jnp.zeros((2, 8)), jnp.zeros(4), RouterConfig(8, 2))
