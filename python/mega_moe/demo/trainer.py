"""One training step, one evaluation, and the check that the weights moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_moe import MoEBuffer
from mega_moe.demo import checkpoint
from mega_moe.demo.config import Config
from mega_moe.demo.corpus import Corpus, training_batch, validation_batches
from mega_moe.demo.model import LanguageModel, balance_loss, initialize
from mega_moe.demo.parallel import Ranks, clip_gradients, is_expert, local, shard

# Relative L2 change from which a weight counts as moved. One Adam step at the first learning rate of the warm-up is
# about this large; a weight without a gradient stays exactly where it was, because there is no weight decay.
MOVED = 1e-3
# FSDP2 gathers weights with NCCL on another stream while the experts run: a fused launch must leave its blocks room.
RESERVED_SMS = 16


class StepResult(NamedTuple):
    """What one step tells, over all ranks."""

    loss: float  # cross-entropy, nats per byte
    balance: float  # load-balancing loss, 1 is even
    load_max_over_mean: float  # of the busiest expert of any layer
    gradient_norm: float  # before clipping


class Trainer:
    """Model, buffer and optimizer of one run on this process's ranks."""

    def __init__(
        self, config: Config, corpus: Corpus, ranks: Ranks, *, backend: str = "auto", precision: str = "bf16"
    ) -> None:
        if config.num_experts % ranks.ep_size:
            raise ValueError(
                f"num_experts is {config.num_experts}, must be a multiple of ep_size = {ranks.ep_size}"
            )
        if config.global_batch % ranks.world_size:
            raise ValueError(
                f"global_batch is {config.global_batch}, must be a multiple of the number of ranks {ranks.world_size}"
            )
        self.config, self.corpus, self.ranks = config, corpus, ranks
        # One buffer serves all layers: they run one after another.
        self.buffer = MoEBuffer(
            ranks.expert_group,
            num_experts=config.num_experts,
            max_tokens_per_rank=config.tokens_per_step // ranks.world_size,
            top_k=config.top_k,
            hidden=config.hidden,
            intermediate=config.intermediate,
            precision=precision,
            backend=backend,
            dtype=self._dtype(),
            device=ranks.device,
            num_reserved_sms=RESERVED_SMS if ranks.world_size > 1 else 0,
        )
        num_local_experts = config.num_experts // ranks.ep_size
        self.first_expert = ranks.expert_rank * num_local_experts
        self.model = LanguageModel(config, num_local_experts).to(ranks.device)
        initialize(self.model, config.seed, self.first_expert)
        for block in self.model.layers():
            block.experts.attach(self.buffer)
        shard(self.model, ranks)
        # By name once and for all: between an FSDP2 forward and backward the modules show gathered copies instead.
        self.parameters = dict(self.model.named_parameters())
        self.initial = {name: local(p.detach()).clone() for name, p in self.parameters.items()}
        self.optimizer = torch.optim.Adam(
            # Two groups, because one multi-tensor step takes either plain tensors or DTensors of one mesh.
            [
                {"params": [p for name, p in self.parameters.items() if not is_expert(name)]},
                {"params": [p for name, p in self.parameters.items() if is_expert(name)]},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        checkpoint.create_moments(self.optimizer)

    def step(self, step: int, learning_rate: float) -> StepResult:
        """Forward, backward, clip and update on the batch of this step. Raises FloatingPointError on a bad loss."""
        config, ranks = self.config, self.ranks
        inputs, targets = (ranks.part(t) for t in training_batch(self.corpus, config, step))
        with self._autocast():
            out = self.model(inputs)
        # This rank's part of the global mean, so that gradients are plain sums over ranks; the balance loss takes the
        # loads of the global batch.
        cross_entropy = _summed_loss(out.logits_BSV, targets) / config.tokens_per_step
        load_LE = ranks.sum(out.load_LE)
        balance = balance_loss(out.mean_prob_LE, load_LE) / ranks.world_size
        (cross_entropy + config.balance_coefficient * balance).backward()

        norm = clip_gradients(self.parameters.values(), config.max_grad_norm, ranks)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

        busiest = (load_LE.amax(dim=-1) / load_LE.mean(dim=-1)).amax()
        loss, balance_value = ranks.sum(torch.stack((cross_entropy, balance))).tolist()
        result = StepResult(loss, balance_value, busiest.item(), norm.item())
        if not all(abs(value) < float("inf") for value in result):
            raise FloatingPointError(f"step {step}: {result}")
        return result

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross-entropy on held-out text, nats per byte, over all ranks."""
        batches = validation_batches(self.corpus, self.config)
        total = torch.zeros((), device=self.ranks.device)
        for batch in batches:
            inputs, targets = (self.ranks.part(t) for t in batch)
            with self._autocast():
                out = self.model(inputs)
            total += _summed_loss(out.logits_BSV, targets)
        return float(self.ranks.sum(total)) / (len(batches) * self.config.tokens_per_step)

    def weights_moved(self) -> dict[str, Any]:
        """Relative change since initialization: of each layer's router, and of each layer's least moved expert."""
        routers, experts = {}, {}
        for name, parameter in self.parameters.items():
            before, now = self.initial[name], local(parameter.detach())
            if is_expert(name):
                experts[name] = self._relative_change(before, now, self.config.num_experts, self.first_expert)
            elif ".router." in name:
                routers[name] = self._relative_change(before[None], now[None], 1, 0)
        smallest = min([*routers.values(), *experts.values()])
        return {
            "ok": smallest > MOVED,
            "threshold": MOVED,
            "routers": routers,
            "least_moved_experts": experts,
        }

    def save(self, folder: Path, step: int, run: dict[str, Any]) -> Path:
        """Write a checkpoint of all ranks after `step` steps."""
        return checkpoint.save(folder, step, self._state(), run, self.ranks)

    def load(self, path: Path) -> None:
        """Take weights and optimizer state from a checkpoint."""
        checkpoint.load(path, self._state(), self.ranks)

    def _state(self) -> dict[str, Tensor]:
        return checkpoint.tensors(self.parameters, self.optimizer, self.ranks)

    def _dtype(self) -> torch.dtype:
        """Of the products. CUDA: bf16, over fp32 master weights. CPU: fp32, which is faster there."""
        return torch.bfloat16 if self.ranks.device.type == "cuda" else torch.float32

    def _autocast(self) -> torch.autocast:
        dtype = self._dtype()
        return torch.autocast(self.ranks.device.type, dtype, enabled=dtype != torch.float32)

    def _relative_change(self, before: Tensor, now: Tensor, num_items: int, first: int) -> float:
        """Smallest of `num_items` relative changes, of which this rank holds some from `first` on, whole or in part."""
        squares = torch.zeros(2, num_items, device=now.device)
        mine = slice(first, first + len(now))
        squares[0, mine] = (now - before).flatten(1).square().sum(dim=1)
        squares[1, mine] = before.flatten(1).square().sum(dim=1)
        change, size = self.ranks.sum(squares)
        return float((change / size).min().sqrt())


def _summed_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), reduction="sum")
