"""A decoder-only language model of DeepSeek-V3 blocks: latent attention, dense MLP or experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import jax_moe
from train.config import AttentionName, Implementation, ModelConfig
from train.routing import router_config


class Parts:
    """Makes the parts that all blocks share, with one type, initialiser and random stream."""

    def __init__(self, config: ModelConfig, attention: AttentionName, rngs: nnx.Rngs):
        self.config, self.attention, self.rngs = config, attention, rngs
        self.dtype = jnp.dtype(config.dtype)
        self.kernel_init = nnx.initializers.normal(config.init_std)

    def linear(self, features_in: int, features_out: int) -> nnx.Linear:
        """A matrix without bias."""
        return nnx.Linear(
            features_in,
            features_out,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=self.kernel_init,
            rngs=self.rngs,
        )

    def norm(self, features: int) -> Norm:
        """A norm over the last axis."""
        return Norm(features, self.config.norm_eps, self.dtype)


class Norm(nnx.Module):
    """Division by the root mean square, times a scale, in float32."""

    def __init__(self, features: int, eps: float, dtype: jnp.dtype):
        self.eps, self.dtype = eps, dtype
        self.scale = nnx.Param(jnp.ones(features, jnp.float32))

    def __call__(self, x: Float[Array, "*batch features"]) -> Array:
        """Returns the normed x, in the type of the computation."""
        x = x.astype(jnp.float32)
        square = jnp.mean(x * x, axis=-1, keepdims=True)
        return (x * lax.rsqrt(square + self.eps) * self.scale[...]).astype(self.dtype)


# A vocabulary of at most so many tokens is looked up by a matmul.
SMALL_VOCABULARY = 1024


class Embedding(nnx.Module):
    """The look-up of tokens; the gradients of a token's many places are added up in float32.

    With few tokens in the vocabulary a token has so many places that adding up one by one, as the
    gradient of a look-up does, took half of a training step of `debug` on an H200. Then a matmul
    with one-hot rows looks up, with the same result, and another one adds up.
    """

    def __init__(self, parts: Parts):
        shape = (parts.config.vocab_size, parts.config.hidden)
        self.dtype = parts.dtype
        self.embedding = nnx.Param(parts.kernel_init(parts.rngs.params(), shape, jnp.float32))

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """Returns the tokens' vectors, in the type of the computation."""
        table = self.embedding[...]
        if len(table) > SMALL_VOCABULARY:
            return jnp.take(table, tokens, axis=0).astype(self.dtype)
        one_hot = jax.nn.one_hot(tokens, len(table), dtype=jnp.float32)
        return jnp.matmul(one_hot, table, precision=lax.Precision.HIGHEST).astype(self.dtype)


def rotate(x: Float[Array, "... dim"], angles: Float[Array, "... half"]) -> Array:
    """Turns the pairs (x0, x1), (x2, x3), ... by `angles`, in float32.

    Returns the pairs' first members, then their second ones: the order is the same for queries and
    keys, so their products do not see it.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Places(NamedTuple):
    """Where the tokens of a batch stand, the same for all blocks.

    Attributes:
      positions: float32 [length], or [batch, length] where documents begin within a window.
      visible: bool [..., query, key], broadcast over the heads: whom a token sees.
      real: bool [batch, length], False for padding; None where all are real.
    """

    positions: Float[Array, ...]
    visible: Bool[Array, ...]
    real: Bool[Array, "batch length"] | None


def find_places(length: int, segments: Int[Array, "batch length"] | None) -> Places:
    """Places tokens in their window, or in their document: a token sees its own alone.

    Args:
      length: tokens of a window.
      segments: the document of each token, ascending from 1; 0 for padding. None for one each.
    """
    causal = jnp.tril(jnp.ones((length, length), bool))
    place = jnp.arange(length, dtype=jnp.int32)
    if segments is None:
        return Places(place.astype(jnp.float32), causal, None)
    begins = segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    first = lax.cummax(jnp.where(begins, place, 0), axis=1)
    same = segments[:, :, None] == segments[:, None, :]
    positions = (place - first).astype(jnp.float32)
    return Places(positions, (causal & same)[:, None], segments > 0)


def mix_by_scores(
    query: Float[Array, "batch length heads dim"],
    key: Float[Array, "batch length heads dim"],
    value: Float[Array, "batch length heads value_dim"],
    visible: Bool[Array, ...],
) -> Float[Array, "batch length heads value_dim"]:
    """Returns each token's mean of the values that it sees, weighed by a softmax in float32.

    Holds the scores of all pairs of tokens, also for the backward pass.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
    scores = jnp.where(visible, scores * query.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(value.dtype), value)


def mix_by_cudnn(query: Array, key: Array, value: Array, visible: Array) -> Array:
    """The same for one document a window by cuDNN's flash attention, which keeps no scores."""
    del visible  # causal
    missing = query.shape[-1] - value.shape[-1]  # it wants values as wide as keys
    padded = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, missing)))
    mixed = jax.nn.dot_product_attention(query, key, padded, is_causal=True, implementation="cudnn")
    return mixed[..., : value.shape[-1]]


MIXES = {"xla": mix_by_scores, "cudnn": mix_by_cudnn}


class Attention(nnx.Module):
    """Multi-head latent attention, causal.

    Keys and values are made from one latent of `kv_rank` per token; the rotary part of the key is
    one vector per token, shared by all heads. Source: DeepSeek-V2, section 2.1.
    """

    def __init__(self, parts: Parts):
        c = self.config = parts.config
        self.mix = MIXES[parts.attention]
        head = c.nope_dim + c.rope_dim
        if c.q_rank is None:
            self.q = parts.linear(c.hidden, c.num_heads * head)
        else:
            self.q_down = parts.linear(c.hidden, c.q_rank)
            self.q_norm = parts.norm(c.q_rank)
            self.q = parts.linear(c.q_rank, c.num_heads * head)
        self.kv_down = parts.linear(c.hidden, c.kv_rank + c.rope_dim)
        self.kv_norm = parts.norm(c.kv_rank)
        self.kv = parts.linear(c.kv_rank, c.num_heads * (c.nope_dim + c.value_dim))
        self.out = parts.linear(c.num_heads * c.value_dim, c.hidden)

    def __call__(self, x: Float[Array, "batch length hidden"], places: Places) -> Array:
        """Mixes every token with those before it: [batch, length, hidden]."""
        c = self.config
        batch, length, _ = x.shape
        heads = (batch, length, c.num_heads, -1)
        q = self.q(x if c.q_rank is None else self.q_norm(self.q_down(x))).reshape(heads)
        latent, key_rope = jnp.split(self.kv_down(x), [c.kv_rank], axis=-1)
        kv = self.kv(self.kv_norm(latent)).reshape(heads)
        key, value = jnp.split(kv, [c.nope_dim], axis=-1)

        frequencies = c.rope_theta ** (-jnp.arange(0, c.rope_dim, 2, jnp.float32) / c.rope_dim)
        angles = places.positions[..., None] * frequencies
        query, query_rope = jnp.split(q, [c.nope_dim], axis=-1)
        query_rope = rotate(query_rope, angles[..., None, :])
        # Spread over the heads in float32, so that the heads' gradients are added up in float32.
        key_rope = rotate(key_rope.astype(jnp.float32), angles)[:, :, None]
        key_rope = jnp.broadcast_to(key_rope, query_rope.shape).astype(x.dtype)
        query = jnp.concatenate([query, query_rope], axis=-1)
        key = jnp.concatenate([key, key_rope], axis=-1)
        mixed = self.mix(query, key, value, places.visible)
        return self.out(mixed.reshape(batch, length, -1))


class DenseMLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, parts: Parts):
        c = parts.config
        self.gate = parts.linear(c.hidden, c.dense_width)
        self.up = parts.linear(c.hidden, c.dense_width)
        self.down = parts.linear(c.dense_width, c.hidden)

    def __call__(self, x: Array, mask: Array | None, *, expert_ids: None) -> tuple[Array, None]:
        """Returns (output, no stats), as the expert layer does; padding may hold anything."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x)), None


def make_experts(parts: Parts, group: jax_moe.ExpertGroup, implementation: Implementation | None):
    """Makes the expert-parallel layer of a block."""
    c = parts.config
    return jax_moe.MoE(
        c.hidden,
        c.expert_width,
        router_config(c),
        group,
        num_shared=c.num_shared,
        capacity_factor=c.capacity_factor,
        dtype=parts.dtype,
        kernel_init=parts.kernel_init,
        implementation=implementation,
        rngs=parts.rngs,
    )


class Block(nnx.Module):
    """Attention and an MLP, each after a norm and added to the residual stream."""

    def __init__(self, parts: Parts, make_mlp: Callable[[Parts], nnx.Module]):
        self.attention_norm = parts.norm(parts.config.hidden)
        self.attention = Attention(parts)
        self.mlp_norm = parts.norm(parts.config.hidden)
        self.mlp: Any = make_mlp(parts)

    def __call__(self, x: Array, places: Places, expert_ids: Array | None = None):
        """Returns (output, the expert layer's stats or None)."""
        x = x + self.attention(self.attention_norm(x), places)
        y, stats = self.mlp(self.mlp_norm(x), places.real, expert_ids=expert_ids)
        return x + y, stats


class LanguageModel(nnx.Module):
    """Embedding, blocks, norm, output matrix.

    Args:
      config: sizes.
      group: where the experts live; everything else is split by batch over the whole mesh.
      implementation: what carries the tokens, as in `jax_moe.MoE`.
      attention: what computes it, as in `Config`.
      gather: puts together the parameters of a part of the model when it runs.
      force: gives the experts of all tokens [batch, length] in every MoE layer, int32 [layers,
        batch, length, K]; None leaves the choice to the routers.
      seed: of the initialisation; the mesh has no part in it.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: jax_moe.ExpertGroup,
        implementation: Implementation | None = None,
        *,
        attention: AttentionName = "xla",
        gather: Callable[[nnx.State], nnx.State],
        force: Callable[[Array], Array] | None = None,
        seed: int,
    ):
        self.config, self.group, self.gather, self.force = config, group, gather, force
        # One stream per block, so that a block starts alike whether it is stacked or not.
        keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)

        def parts(key):
            return Parts(config, attention, nnx.Rngs(key))

        ends = parts(keys[-1])
        self.embedding = Embedding(ends)
        dense, moe = keys[: config.num_dense_layers], keys[config.num_dense_layers : -1]
        self.dense_blocks = nnx.List(Block(parts(key), DenseMLP) for key in dense)
        experts = functools.partial(make_experts, group=group, implementation=implementation)

        def make_block(key):
            return Block(parts(key), experts)

        self.moe_blocks: Block | nnx.List
        if config.scan_layers and config.num_moe_layers:
            self.moe_blocks = stack_blocks(make_block, moe)
        else:
            self.moe_blocks = nnx.List(make_block(key) for key in moe)
        self.norm = ends.norm(config.hidden)
        self.head = ends.linear(config.hidden, config.vocab_size)

    def __call__(
        self, tokens: Int[Array, "batch length"], segments: Int[Array, "batch length"] | None = None
    ):
        """Returns (logits float32 [batch, length, vocab], the MoE layers' stats [layers, ...]).

        Documents (`segments`, as in `find_places`) do not see each other.
        """
        mesh = self.group.mesh
        split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        places = find_places(tokens.shape[1], segments)
        forced = None if self.force is None else self.force(tokens)

        def whole(part):
            graph, state = nnx.split(part)
            return nnx.merge(graph, self.gather(state))

        def run(x, block, expert_ids=None):
            graph, state = nnx.split(block)

            def call(state, x, places, expert_ids):
                # Pinned at every block, or XLA may gather the batch onto each device.
                x = lax.with_sharding_constraint(x, split)
                return nnx.merge(graph, self.gather(state))(x, places, expert_ids)

            call = jax.checkpoint(call) if self.config.remat else call
            return call(state, x, places, expert_ids)

        x = lax.with_sharding_constraint(whole(self.embedding)(tokens), split)
        for block in self.dense_blocks:
            x, _ = run(x, block)
        x, stats = run_moe_blocks(run, x, self.moe_blocks, forced)
        logits = whole(self.head)(self.norm(x)).astype(jnp.float32)
        return lax.with_sharding_constraint(logits, split), stats

    def routing_biases(self) -> Float[Array, "layers experts"]:
        """Returns the routing biases of the MoE layers."""
        if isinstance(self.moe_blocks, Block):
            return self.moe_blocks.mlp.bias[...]
        return jnp.stack([block.mlp.bias[...] for block in self.moe_blocks])

    def update_biases(self, counts: Int[Array, "layers experts"], step_size) -> None:
        """Moves every routing bias one step, from the optimizer step's global token counts."""
        if isinstance(self.moe_blocks, Block):
            self.moe_blocks.mlp.update_bias(counts, step_size)
            return
        for block, layer_counts in zip(self.moe_blocks, counts, strict=True):
            block.mlp.update_bias(layer_counts, step_size)


def stack_blocks(make_block: Callable, keys: Array) -> Block:
    """Makes one block whose variables have a leading axis, one entry per key."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make_block(keys[0])))
    return nnx.merge(graph, jax.vmap(lambda key: nnx.state(make_block(key)))(keys))


def run_moe_blocks(run: Callable, x: Array, blocks: Block | nnx.List, forced: Array | None):
    """Runs x through the blocks in turn; returns it and their stats [layers, ...], if any."""
    if isinstance(blocks, Block):
        graph, state = nnx.split(blocks)

        def step(x, layer):
            state, expert_ids = layer
            return run(x, nnx.merge(graph, state), expert_ids)

        return lax.scan(step, x, (state, forced))
    each = []
    for number, block in enumerate(blocks):
        x, stats = run(x, block, None if forced is None else forced[number])
        each.append(stats)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) if each else None
