"""A decoder-only language model of DeepSeek-V3 blocks: latent attention, dense MLP or experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import jax_moe
from train.config import Implementation, ModelConfig


class Parts:
    """Makes the parts that all blocks share, with one type, initialiser and random stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, self.rngs = config, rngs
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


class Attention(nnx.Module):
    """Multi-head latent attention, causal.

    Keys and values are made from one latent of `kv_rank` per token; the rotary part of the key is
    one vector per token, shared by all heads. Source: DeepSeek-V2, section 2.1.
    """

    def __init__(self, parts: Parts):
        c = self.config = parts.config
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

    def __call__(self, x: Float[Array, "batch length hidden"]) -> Array:
        """Mixes every token with those before it: [batch, length, hidden]."""
        c = self.config
        batch, length, _ = x.shape
        heads = (batch, length, c.num_heads, -1)
        q = self.q(x if c.q_rank is None else self.q_norm(self.q_down(x))).reshape(heads)
        latent, key_rope = jnp.split(self.kv_down(x), [c.kv_rank], axis=-1)
        kv = self.kv(self.kv_norm(latent)).reshape(heads)
        key, value = jnp.split(kv, [c.nope_dim], axis=-1)

        frequencies = c.rope_theta ** (-jnp.arange(0, c.rope_dim, 2, jnp.float32) / c.rope_dim)
        angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
        query, query_rope = jnp.split(q, [c.nope_dim], axis=-1)
        query_rope = rotate(query_rope, angles[:, None, :])
        key_rope = rotate(key_rope, angles)

        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        scores = scores + jnp.einsum("bqhd,bkd->bhqk", query_rope, key_rope)
        scores = scores.astype(jnp.float32) * (c.nope_dim + c.rope_dim) ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.out(mixed.reshape(batch, length, -1))


class DenseMLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, parts: Parts):
        c = parts.config
        self.gate = parts.linear(c.hidden, c.dense_width)
        self.up = parts.linear(c.hidden, c.dense_width)
        self.down = parts.linear(c.dense_width, c.hidden)

    def __call__(self, x: Array) -> tuple[Array, None]:
        """Returns (output, no stats), as the expert layer does."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x)), None


def make_experts(parts: Parts, group: jax_moe.ExpertGroup, implementation: Implementation | None):
    """Makes the expert-parallel layer of a block."""
    c = parts.config
    router = jax_moe.RouterConfig(
        num_experts=c.num_experts,
        top_k=c.top_k,
        num_groups=c.num_groups,
        top_groups=c.top_groups,
        scale=c.routed_scale,
    )
    return jax_moe.MoE(
        c.hidden,
        c.expert_width,
        router,
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

    def __call__(self, x: Array):
        """Returns (output, the expert layer's stats or None)."""
        x = x + self.attention(self.attention_norm(x))
        y, stats = self.mlp(self.mlp_norm(x))
        return x + y, stats


class LanguageModel(nnx.Module):
    """Embedding, blocks, norm, output matrix.

    Args:
      config: sizes.
      group: where the experts live; everything else is split by batch over the whole mesh.
      implementation: what carries the tokens, as in `jax_moe.MoE`.
      gather: puts together the parameters of a part of the model when it runs.
      seed: of the initialisation; the mesh has no part in it.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: jax_moe.ExpertGroup,
        implementation: Implementation | None = None,
        *,
        gather: Callable[[nnx.State], nnx.State],
        seed: int,
    ):
        self.config, self.group, self.gather = config, group, gather
        # One stream per block, so that a block starts alike whether it is stacked or not.
        keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
        ends = Parts(config, nnx.Rngs(keys[-1]))
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.hidden,
            dtype=ends.dtype,
            embedding_init=ends.kernel_init,
            rngs=ends.rngs,
        )
        dense, moe = keys[: config.num_dense_layers], keys[config.num_dense_layers : -1]
        self.dense_blocks = nnx.List(Block(Parts(config, nnx.Rngs(key)), DenseMLP) for key in dense)
        experts = functools.partial(make_experts, group=group, implementation=implementation)

        def make_block(key):
            return Block(Parts(config, nnx.Rngs(key)), experts)

        self.moe_blocks: Block | nnx.List
        if config.scan_layers and config.num_moe_layers:
            self.moe_blocks = stack_blocks(make_block, moe)
        else:
            self.moe_blocks = nnx.List(make_block(key) for key in moe)
        self.norm = ends.norm(config.hidden)
        self.head = ends.linear(config.hidden, config.vocab_size)

    def __call__(self, tokens: Int[Array, "batch length"]):
        """Returns (logits float32 [batch, length, vocab], the MoE layers' stats [layers, ...])."""
        mesh = self.group.mesh
        split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

        def run(x, block):
            graph, state = nnx.split(block)

            def call(state, x):
                # Pinned at every block, or XLA may gather the batch onto each device.
                x = lax.with_sharding_constraint(x, split)
                return nnx.merge(graph, self.gather(state))(x)

            return (jax.checkpoint(call) if self.config.remat else call)(state, x)

        def whole(part):
            graph, state = nnx.split(part)
            return nnx.merge(graph, self.gather(state))

        x = lax.with_sharding_constraint(whole(self.embedding)(tokens), split)
        for block in self.dense_blocks:
            x, _ = run(x, block)
        if isinstance(self.moe_blocks, Block):
            x, stats = scan_blocks(run, x, self.moe_blocks)
        else:
            each = []
            for block in self.moe_blocks:
                x, layer_stats = run(x, block)
                each.append(layer_stats)
            stats = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) if each else None
        logits = whole(self.head)(self.norm(x)).astype(jnp.float32)
        return lax.with_sharding_constraint(logits, split), stats

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


def scan_blocks(run: Callable, x: Array, stacked: Block):
    """Runs x through the stacked blocks in turn."""
    graph, state = nnx.split(stacked)
    return lax.scan(lambda x, state: run(x, nnx.merge(graph, state)), x, state)
