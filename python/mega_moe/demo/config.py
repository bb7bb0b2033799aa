"""Every number of the demonstration run, in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

_MAY_BE_ZERO = frozenset({"seed", "balance_coefficient", "minutes"})

# Fields that a resumed run may change: how long it runs and what it reports. The rest identifies the run.
RESUMABLE = frozenset({"steps", "minutes", "eval_sequences", "log_every", "eval_every", "checkpoint_every"})


@dataclass(frozen=True)
class Config:
    """Sizes of the model, the data and the run. The defaults are tuned for loss per minute on two CPU cores.

    Raises ValueError where two fields do not fit together; the message names the field, its value and what it must be.
    """

    # Model. The fused kernels serve hidden sizes divisible by 256 and expert sizes divisible by 128.
    hidden: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    top_k: int = 4
    intermediate: int = 128  # width of one expert
    vocab_size: int = 256  # the model reads bytes
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    balance_coefficient: float = 1e-2  # weight of the load-balancing loss alongside the cross-entropy

    # Data.
    sequence_length: int = 128  # bytes
    global_batch: int = 8  # sequences of one step, over all ranks
    max_corpus_bytes: int = 16 << 20
    validation_every: int = 20  # one source file in so many is held out
    eval_sequences: int = 128

    # Run.
    steps: int = 900
    minutes: float = 5.0  # time box of this invocation's training; 0 is none
    learning_rate: float = 3e-3
    # With 30 the loss jumps at step 23; with 100 rounding decides, on some texts, what follows step 33.
    warmup_steps: int = 200
    decay_share: float = 0.5  # last part of the run, in which the learning rate falls to zero
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0
    log_every: int = 100
    eval_every: int = 300
    checkpoint_every: int = 300

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _MAY_BE_ZERO:
                if value < 0:
                    raise ValueError(f"{field.name} is {value}, must not be negative")
            elif value <= 0:
                raise ValueError(f"{field.name} is {value}, must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, must be a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, must be even: rotary embedding turns pairs")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, must be at most num_experts = {self.num_experts}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.global_batch * self.sequence_length

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return asdict(self)
