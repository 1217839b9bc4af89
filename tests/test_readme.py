"""The README's examples, run as a user would, and the results checked against a dense layer."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"

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


def test_examples_run_and_are_right(tmp_path):
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    script = tmp_path / "example.py"
    script.write_text("".join(examples) + CHECK)
    command = [sys.executable, "-W", "error", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "checked\n"
