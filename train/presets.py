"""The named configurations: `tiny` for a laptop, up to DeepSeek-V3's 671 B parameters."""

from __future__ import annotations

from train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig

# The mesh of `tiny`: one routing group per node, as in DeepSeek-V3, so that keeping 2 of the 4
# groups keeps a token on 2 of the 4 nodes; with 2 nodes the limit would limit nothing.
TINY = Config(
    name="tiny",
    model=ModelConfig(
        vocab_size=256,
        hidden=96,
        num_layers=3,
        num_dense_layers=1,
        dense_width=256,
        num_heads=4,
        kv_rank=64,
        nope_dim=16,
        rope_dim=16,
        value_dim=32,
        num_experts=8,
        expert_width=96,
        top_k=2,
        num_groups=4,
        top_groups=2,
    ),
    optimizer=OptimizerConfig(peak_rate=3e-3, final_rate=3e-4, total_steps=2500, warmup_steps=100),
    data=DataConfig(batch=16, sequence=128),
    mesh=MeshConfig(data=1, node=4, rank=2, cpu_devices=8),
    steps=500,
)

# Every device hosts a whole group, 8 ranks on 4 nodes: the same topology on one GPU as on more.
DEBUG = Config(
    name="debug",
    model=ModelConfig(
        vocab_size=256,
        hidden=512,
        num_layers=8,
        num_dense_layers=1,
        dense_width=2048,
        num_heads=8,
        kv_rank=256,
        nope_dim=64,
        rope_dim=32,
        value_dim=64,
        num_experts=32,
        expert_width=256,
        top_k=4,
        num_groups=4,
        top_groups=2,
        dtype="bfloat16",
        scan_layers=True,
    ),
    optimizer=OptimizerConfig(peak_rate=1e-3, final_rate=1e-4, total_steps=2000, warmup_steps=100),
    data=DataConfig(batch=64, sequence=512),
    mesh=MeshConfig(data=-1, node=1, rank=1, virtual_ranks=8, num_nodes=4),
    steps=2000,
)

# DeepSeek-V2-Lite's sizes; the routing is DeepSeek-V3's (sigmoid, bias, normalised weights).
LITE = Config(
    name="16b",
    model=ModelConfig(
        vocab_size=102_400,
        hidden=2048,
        num_layers=27,
        num_dense_layers=1,
        dense_width=10_944,
        num_heads=16,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        num_experts=64,
        expert_width=1408,
        top_k=6,
        num_groups=1,
        top_groups=1,
        num_shared=2,
        dtype="bfloat16",
        capacity_factor=2.0,
        scan_layers=True,
        remat=True,
    ),
    optimizer=OptimizerConfig(
        peak_rate=4.2e-4,
        final_rate=4.2e-5,
        total_steps=20_000,
        warmup_steps=2000,
        aux_loss_weight=1e-4,
    ),
    data=DataConfig(batch=64, sequence=4096, synthetic=True),
    micro_batches=8,
    mesh=MeshConfig(fsdp=-1, node=1, rank=8, shard_dense=True),
    steps=20_000,
)

# The report's sizes and rates, without multi-token prediction and its schedule of batch sizes. The
# texts of these two are one's own token ids: --data.file ids.npy --data.no-synthetic.
V3 = Config(
    name="deepseek-v3-671b",
    model=ModelConfig(
        vocab_size=129_280,
        hidden=7168,
        num_layers=61,
        num_dense_layers=3,
        dense_width=18_432,
        num_heads=128,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        num_experts=256,
        expert_width=2048,
        top_k=8,
        num_groups=8,
        top_groups=4,
        routed_scale=2.5,
        init_std=0.006,
        dtype="bfloat16",
        capacity_factor=2.0,
        scan_layers=True,
        remat=True,
    ),
    optimizer=OptimizerConfig(
        peak_rate=2.2e-4,
        final_rate=2.2e-5,
        total_steps=220_000,
        warmup_steps=2000,
        decay_steps=70_000,
        bias_frozen_steps=7500,
        aux_loss_weight=1e-4,
    ),
    data=DataConfig(batch=16_384, sequence=4096, synthetic=True),
    micro_batches=8,
    mesh=MeshConfig(fsdp=-1, node=8, rank=8, shard_dense=True),
    steps=220_000,
)

CONFIGS = {
    "tiny": ("0.76 M parameters on bytes, for 8 CPU devices on a laptop", TINY),
    "debug": ("100 M parameters on bytes, for a GPU with 8 virtual ranks", DEBUG),
    "16b": ("15.7 B parameters: DeepSeek-V2-Lite's sizes, for 8 GPUs a group", LITE),
    "deepseek-v3-671b": ("671 B parameters: DeepSeek-V3, for 64 GPUs a group", V3),
}
