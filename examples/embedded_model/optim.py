"""Two optimizers in one step: Muon for the matrices inside layers, AdamW for embeddings, norms, biases, convolutions.

Muon (Jordan et al., 2024) moves a matrix along its orthogonalised momentum; matrices of one shape are processed as one
batch. The update is scaled to the size of AdamW's update, so both share a learning rate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.embedded_model.model import canonical

STEPS = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
         (2.8366, -3.0525, 1.2012))  # fmt: skip


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of a batch [n, rows, columns], to a few percent."""
    flat = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if flat else matrices
    x = x.to(torch.bfloat16) if x.is_cuda else x.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in STEPS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if flat else x


class Optimizer:
    """Updates a model's parameters, each by the method of its kind; `step(rate)` uses and clears the gradients."""

    def __init__(self, model: nn.Module, decay: float = 0.05, momentum: float = 0.95) -> None:
        self.decay, self.momentum = decay, momentum
        self.names: dict[str, nn.Parameter] = {
            canonical(n): p for n, p in model.named_parameters() if p.requires_grad and "lm_head" not in n
        }
        # a bf16 model (as on CUDA) is updated through float32 copies, a float32 model directly
        self.master = {n: p.detach().float() if p.dtype != torch.float32 else p for n, p in self.names.items()}
        self.shapes: dict[torch.Size, list[str]] = {}
        self.plain: list[str] = []
        for name, parameter in self.names.items():
            inside = parameter.dim() == 2 and "embed" not in name and "bos_eos" not in name
            self.shapes.setdefault(parameter.shape, []).append(name) if inside else self.plain.append(name)
        self.slow = {n: torch.zeros_like(p, requires_grad=False) for n, p in self.master.items()}
        self.square = {n: torch.zeros_like(self.master[n]) for n in self.plain}
        self.count = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Updates every parameter that has a gradient."""
        self.count += 1
        names = [n for n, p in self.names.items() if p.grad is not None]
        grads = [self.names[n].grad for n in names]
        if grads[0].dtype != torch.float32:
            full = [torch.empty_like(self.master[n]) for n in names]
            torch._foreach_copy_(full, grads)
            grads = full
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (1.0 / norm.clamp(min=1.0)))
        by_name = dict(zip(names, grads, strict=True))
        for group in self.shapes.values():
            self._muon([n for n in group if n in by_name], by_name, rate)
        self._adam([n for n in self.plain if n in by_name], by_name, rate)
        self.publish()
        for parameter in self.names.values():
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the float32 weights, rounded, into the model."""
        live = [n for n in self.names if self.master[n] is not self.names[n]]
        if live:
            torch._foreach_copy_([self.names[n] for n in live], [self.master[n] for n in live])

    def _muon(self, names: list[str], grads_of: dict[str, Tensor], rate: float) -> None:
        if not names:
            return
        weights, grads = [self.master[n] for n in names], [grads_of[n] for n in names]
        slow = [self.slow[n] for n in names]
        torch._foreach_lerp_(slow, grads, 1 - self.momentum)
        mixed = torch._foreach_lerp(grads, slow, self.momentum)
        update = orthogonal(torch.stack(list(mixed)))
        scale = 0.2 * max(weights[0].shape) ** 0.5
        torch._foreach_mul_(weights, 1 - rate * self.decay)
        torch._foreach_add_(weights, [u.to(weights[0].dtype) for u in update.unbind(0)], alpha=-rate * scale)

    def _adam(self, names: list[str], grads_of: dict[str, Tensor], rate: float) -> None:
        weights, grads = [self.master[n] for n in names], [grads_of[n] for n in names]
        slow, square = [self.slow[n] for n in names], [self.square[n] for n in names]
        torch._foreach_lerp_(slow, grads, 0.1)
        torch._foreach_mul_(square, 0.98)
        torch._foreach_addcmul_(square, grads, grads, 0.02)
        root = torch._foreach_sqrt(torch._foreach_div(square, 1 - 0.98**self.count))
        torch._foreach_add_(root, 1e-8)
        torch._foreach_addcdiv_(weights, slow, root, -rate / (1 - 0.9**self.count))

    def state(self) -> dict[str, Tensor]:
        """Momenta by name, for a checkpoint."""
        return {f"slow.{n}": t for n, t in self.slow.items()} | {f"square.{n}": t for n, t in self.square.items()}

    def load(self, state: dict[str, Tensor], count: int) -> None:
        """Loads momenta from a checkpoint; missing ones start at zero."""
        self.count = count
        for name, tensor in state.items():
            kind, _, rest = name.partition(".")
            {"slow": self.slow, "square": self.square}[kind][rest].copy_(tensor)
