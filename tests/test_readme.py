"""The examples of README and docs/layer.md, run as a user would, and their results checked."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHECK = """
routing = jax_moe.route(x @ gate, None, config)
chosen = jnp.einsum("th,tkhd->tkd", x, experts[routing.expert_ids])
dense = jnp.einsum("tkd,tk->td", chosen, routing.weights)
assert jnp.allclose(y, dense, rtol=1e-4, atol=1e-4), abs(y - dense).max()
assert all(jnp.isfinite(g).all() and g.any() for g in gradients)
assert out.shape == (8, 64, 32) and out.any()
assert int(stats.counts.sum()) == 8 * 64 * config.top_k
print("checked")
"""


LAYER_CHECK = """
assert int(stats.counts.sum()) == 4 * 32 * config.top_k
assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))
assert layer.bias[...].any()
print("checked")
"""


@pytest.mark.parametrize(
    ("page", "count", "check"), [("README.md", 2, CHECK), ("docs/layer.md", 1, LAYER_CHECK)]
)
def test_examples_run_and_are_right(page, count, check, tmp_path):
    text = (ROOT / page).read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(examples) == count
    script = tmp_path / "example.py"
    script.write_text("".join(examples) + check)
    command = [sys.executable, "-W", "error", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "checked\n"
