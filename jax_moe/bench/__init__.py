"""The bench: plan, dispatch and combine against the plain-JAX ways, verified before timed.

Run it as `python -m jax_moe.bench`; see `--help`, and docs/results.md for what it gave.
"""
