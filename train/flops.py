"""Arithmetic of training: operations per token, and what a device could do at most."""

from __future__ import annotations

from train.config import ModelConfig

# Dense bfloat16, TFLOP/s by a part of JAX's device kind, as the makers state them; the first that
# fits counts.
_PEAKS = {
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H200": 989.4,
    "H800": 989.4,
    "B200": 2250.0,
    "A100": 312.0,
}


def peak_tflops(device_kind: str) -> float | None:
    """Returns a device's dense bfloat16 peak in TFLOP/s; None where it is not known."""
    return next((peak for part, peak in _PEAKS.items() if part in device_kind), None)


def matrix_weights_per_token(model: ModelConfig) -> int:
    """Returns how many weights of matrices a token is multiplied with.

    The router, the chosen and shared experts and the output matrix count; the embedding is a
    look-up, norms are no matrices.
    """
    c = model
    head = c.nope_dim + c.rope_dim
    query = c.hidden * c.num_heads * head
    if c.q_rank is not None:
        query = c.q_rank * (c.hidden + c.num_heads * head)
    attention = query + c.hidden * (c.kv_rank + c.rope_dim)
    attention += c.kv_rank * c.num_heads * (c.nope_dim + c.value_dim)
    attention += c.num_heads * c.value_dim * c.hidden
    dense = 3 * c.hidden * c.dense_width
    experts = 3 * c.hidden * c.expert_width * (c.top_k + c.num_shared) + c.hidden * c.num_experts
    layers = c.num_layers * attention + c.num_dense_layers * dense + c.num_moe_layers * experts
    return layers + c.hidden * c.vocab_size


def flops_per_token(model: ModelConfig, sequence: int) -> int:
    """Returns the floating-point operations of one token's forward and backward pass.

    A multiplication and an addition are two. Each matrix counts three times (forward, gradient of
    the input, gradient of the weight), and so do the attention's two products, with sequence / 2
    positions: causal, each token sees half of the others on average. Not counted: norms, softmax,
    activations, the optimizer, what remat computes again.
    """
    head = model.nope_dim + model.rope_dim + model.value_dim
    products = model.num_layers * model.num_heads * head * sequence // 2
    return 6 * (matrix_weights_per_token(model) + products)
