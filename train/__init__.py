"""Trains a DeepSeek-V3-style mixture-of-experts language model with jax_moe."""
