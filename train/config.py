"""What a run is made of: frozen dataclasses, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

Implementation = Literal["ptx", "cpu", "xla", "reference"]
AttentionName = Literal["xla", "cudnn"]


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ValueError(message)


def _at_least(least: int, config: Any, names: str, where: str = "") -> None:
    """Refuses a smaller number under any of the names."""
    for name in names.split():
        value = getattr(config, name)
        _refuse(value < least, f"{where}{name}={value} must be at least {least}.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model of DeepSeek-V3 blocks."""

    vocab_size: int
    """Token ids; 256 for bytes."""
    hidden: int
    """Width of the residual stream."""
    num_layers: int
    """Blocks in all."""
    num_dense_layers: int
    """The first of them, with a dense MLP in place of experts."""
    dense_width: int
    """Width of the dense MLP."""
    num_heads: int
    """Attention heads."""
    kv_rank: int
    """Width of the latent from which keys and values are made."""
    nope_dim: int
    """Per head: width of query and key without position."""
    rope_dim: int
    """Per head: width of the rotary part; the key's is shared by all heads."""
    value_dim: int
    """Per head: width of the value."""
    num_experts: int
    """Routed experts."""
    expert_width: int
    """Width of one expert."""
    top_k: int
    """Routed experts a token goes to."""
    num_groups: int
    """Groups of experts; a multiple of the mesh's nodes, or 1 for unlimited routing."""
    top_groups: int
    """Groups a token may choose from."""
    num_shared: int = 1
    """Experts that every token goes to."""
    routed_scale: float = 1.0
    """Factor on the routed experts' weights."""
    q_rank: int | None = None
    """Width of the query's latent; None for a full-rank query."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of every matrix at the start."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; parameters, gate, norms, softmax and loss are float32 always."""
    capacity_factor: float | None = None
    """Rows per rank as a multiple of the even share; None never drops a row."""
    scan_layers: bool = False
    """Stack the MoE layers and scan over them: one layer to compile instead of many."""
    remat: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""

    def __post_init__(self) -> None:
        _at_least(1, self, "num_layers num_heads", "model.")
        _refuse(
            self.rope_dim % 2 != 0,
            f"model.rope_dim={self.rope_dim} must be even: it rotates pairs.",
        )
        _refuse(
            not 0 <= self.num_dense_layers <= self.num_layers,
            f"model.num_dense_layers={self.num_dense_layers} must be 0..{self.num_layers} "
            "(model.num_layers).",
        )

    @property
    def num_moe_layers(self) -> int:
        """Blocks with experts."""
        return self.num_layers - self.num_dense_layers


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule, and the routing bias's step."""

    peak_rate: float
    """Highest learning rate."""
    final_rate: float
    """Learning rate at the end."""
    total_steps: int
    """Length of the schedule, in steps; a run may stop earlier."""
    warmup_steps: int
    """Steps of linear warm-up; they multiply what follows."""
    decay_steps: int | None = None
    """The last steps, a cosine from the highest rate to the final one; None for all steps."""
    b1: float = 0.9
    """Decay of the gradient's mean."""
    b2: float = 0.95
    """Decay of the gradient's mean square."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate, on every parameter."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    bias_step: float = 1e-3
    """How far one step moves an expert's routing bias."""
    bias_frozen_steps: int = 0
    """The last steps of total_steps, in which the biases stay."""
    aux_loss_weight: float = 0.0
    """Factor on the sequence-wise load balance loss, summed over the layers."""

    def __post_init__(self) -> None:
        _at_least(1, self, "total_steps", "optimizer.")
        _at_least(0, self, "warmup_steps bias_frozen_steps", "optimizer.")
        _refuse(
            self.decay_steps is not None and not 0 < self.decay_steps <= self.total_steps,
            f"optimizer.decay_steps={self.decay_steps} must be 1..{self.total_steps} "
            "(optimizer.total_steps), or None.",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is cut."""

    batch: int
    """Sequences per step, over all devices."""
    sequence: int
    """Predictions per sequence; a window holds one token more."""
    file: str | None = None
    """A text, JSONL (its "text" fields) or token ids (.npy); None for the King James Bible."""
    documents: bool = False
    """Pack documents (JSONL records, or what blank lines part) into windows; none sees another."""
    synthetic: bool = False
    """Random token ids instead of a text, to look at speed."""
    bytes_per_token: float = 1.0
    """Of the text behind the token ids, for bits per byte."""
    validation_part: float = 0.05
    """The last part of the text, kept for validation."""
    validation_windows: int = 512
    """At most so many windows of it are scored."""

    def __post_init__(self) -> None:
        _at_least(1, self, "batch sequence validation_windows", "data.")
        _refuse(
            not 0 < self.validation_part < 1,
            f"data.validation_part={self.validation_part} must lie between 0 and 1.",
        )
        _refuse(
            self.bytes_per_token <= 0, f"data.bytes_per_token={self.bytes_per_token} must be > 0."
        )
        _refuse(
            self.synthetic and (self.documents or self.file is not None),
            f"data.synthetic=True with data.file={self.file}, data.documents={self.documents}: it "
            "uses no text.",
        )


@dataclasses.dataclass(frozen=True)
class RoutingConfig:
    """A switch for debugging: who chooses the tokens' experts."""

    mode: Literal["learned", "balanced", "random", "replay"] = "learned"
    """The routers; all experts alike; at random within the router's limits; as in `file`."""
    file: str | None = None
    """What `python -m train.record_routing` wrote, for "replay"."""

    def __post_init__(self) -> None:
        _refuse(
            (self.mode == "replay") != (self.file is not None),
            f'routing.mode="{self.mode}" with routing.file={self.file}: "replay" needs the file '
            "that python -m train.record_routing writes, and nothing else takes one.",
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices by axes; one of data, fsdp, node, rank may be -1 and takes what is left.

    Sequences are split over all axes, experts over node and rank: so expert parallelism does not
    depend on how many replicas there are.
    """

    data: int = 1
    """Replicas of everything."""
    fsdp: int = 1
    """Replicas that share the parameters and the optimizer's state: each holds a part of them."""
    node: int = 1
    """Nodes of a group."""
    rank: int = -1
    """Devices per node."""
    shard_dense: bool = False
    """Cut what is not an expert's over node and rank too."""
    virtual_ranks: int = 1
    """Ranks hosted by each device."""
    num_nodes: int | None = None
    """Nodes of the topology where it is not the node axis (virtual ranks on few devices)."""
    cpu_devices: int = 0
    """CPU devices to simulate, over all processes; 0 leaves it to JAX."""

    def __post_init__(self) -> None:
        _at_least(0, self, "cpu_devices", "mesh.")


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run."""

    name: str
    """Name of the configuration, and of the run's folder."""
    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig
    mesh: MeshConfig
    steps: int
    """The run stops here; started again with more, it runs on."""
    micro_batches: int = 1
    """Parts into which a step's batch is cut; their gradients and counts are added up."""
    routing: RoutingConfig = RoutingConfig()
    """Who chooses the experts."""
    nan_guard: Literal["stop", "skip"] = "stop"
    """After a step whose loss or gradient is not finite, which changes nothing: stop, or go on."""
    seed: int = 0
    """Of initialisation and data order."""
    implementation: Implementation | None = None
    """What carries the tokens; None is the fastest that this backend has."""
    attention: AttentionName = "xla"
    """Who computes it: XLA from whole score matrices, or cuDNN's flash attention (NVIDIA GPUs)."""
    run_dir: str | None = None
    """Folder of log, plot and checkpoints; None for runs/NAME."""
    save_every: int = 100
    """Steps from one checkpoint to the next; one is written at the end in any case."""
    keep_checkpoints: int = 2
    """How many to keep."""
    eval_every: int = 250
    """Steps from one validation to the next; there is one at the end in any case."""
    print_every: int = 50
    """Steps from one printed line to the next."""
    dead_s: float = 20.0
    """Among several processes: seconds without a sign of life until one counts as dead."""
    stall_s: float = 300.0
    """Seconds in which no process gets on until the run counts as stuck."""
    profile_at: int | None = None
    """First step that jax.profiler records, into the run's folder."""
    profile_steps: int = 3
    """How many it records."""
    peak_tflops: float | None = None
    """What MFU refers to, of one device; None for its dense bfloat16 peak, where that is known."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too, into the run's folder."""

    def __post_init__(self) -> None:
        _at_least(1, self, "save_every keep_checkpoints eval_every print_every profile_steps")
        _refuse(
            not 0 < self.steps <= self.optimizer.total_steps,
            f"steps={self.steps} must be 1..{self.optimizer.total_steps}, the length of the "
            "schedule (optimizer.total_steps).",
        )
        _refuse(
            self.micro_batches < 1 or self.data.batch % self.micro_batches != 0,
            f"micro_batches={self.micro_batches} must be 1 or more and divide "
            f"data.batch={self.data.batch}.",
        )
        model = self.model
        _refuse(
            self.attention == "cudnn"
            and (
                model.dtype != "bfloat16"
                or self.data.documents
                or model.value_dim > model.nope_dim + model.rope_dim
            ),
            f'attention="cudnn" with model.dtype={model.dtype}, data.documents='
            f"{self.data.documents}, model.value_dim={model.value_dim}: it takes bfloat16, one "
            f"document a window, and values no wider than keys ({model.nope_dim + model.rope_dim})."
            ' Use attention="xla".',
        )

    @property
    def folder(self) -> Path:
        """The run's folder; a run on another file gets one of its own."""
        if self.run_dir is not None:
            return Path(self.run_dir)
        stem = "" if self.data.file is None else f"-{Path(self.data.file).stem}"
        return Path("runs") / f"{self.name}{stem}"


# What may differ between a run and its continuation.
_FREE = {"steps", "run_dir", "save_every", "keep_checkpoints", "eval_every", "print_every"}
_FREE |= {"dead_s", "stall_s"}
_FREE |= {"profile_at", "profile_steps", "peak_tflops", "tensorboard"}
_FREE |= {"mesh", "implementation", "attention", "micro_batches", "nan_guard"}


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the configuration as plain nested dicts."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = Config, where: str = "") -> Any:
    """Builds a configuration from nested dicts.

    Raises:
      ValueError: an unknown or missing key, or a value of the wrong type; the message names it.
    """
    _refuse(
        not isinstance(values, dict), f"{where.rstrip('.') or 'config'}={values!r} has no keys."
    )
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    _refuse(bool(unknown), f"unknown key {where}{', '.join(unknown)}: known are {sorted(hints)}.")
    arguments = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = from_dict(value, hints[name], f"{where}{name}.")
        else:
            arguments[name] = _checked(value, hints[name], where + name)
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"{where or 'config'}: {error}") from error


def _checked(value: Any, hint: Any, name: str) -> Any:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if is_union else (hint,):
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option is float and type(value) is int:
            return float(value)
        elif type(value) is option:
            return value
    raise ValueError(f"{name}={value!r} must be of type {hint}.")


def save(config: Config, path: Path) -> None:
    """Writes the resolved configuration as JSON; who reads meanwhile sees the old or the new."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> Config:
    """Reads what `save` wrote.

    Raises:
      ValueError: no such file, no JSON, or what `from_dict` refuses; the message names the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give a name that python -m train lists, or "
            "the JSON file of a configuration, as RUN_FOLDER/config.json."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} must be JSON ({error}): mend it, or begin with the config.json of a run."
        ) from error
    try:
        return from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def differences(old: Config, new: Config) -> list[str]:
    """Names what keeps `new` from continuing a run of `old`, as "key: old -> new"."""
    changes = []

    def walk(a: dict, b: dict, where: str) -> None:
        for key in a:
            if where == "" and key in _FREE:
                continue
            if isinstance(a[key], dict):
                walk(a[key], b[key], f"{where}{key}.")
            elif a[key] != b[key]:
                changes.append(f"{where}{key}: {a[key]} -> {b[key]}")

    walk(to_dict(old), to_dict(new), "")
    return changes
