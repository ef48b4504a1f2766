"""The fp16 stand-in of the other tests does what fp16 on a GPU does: overflow, skip, halve, go on, grow."""

from collections.abc import Callable, Iterable

import pytest
import torch
from fp16_cpu import Fp16CpuAccelerator

from accumft.launch import reset_accelerate_state

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd_fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
CLIP = 0.05


def make_mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.fixture(autouse=True)
def clean_state() -> Iterable[None]:
    reset_accelerate_state()
    yield
    reset_accelerate_state()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_real_overflows_skip_the_update_and_halve_the_scale(name: str) -> None:
    inputs, labels = make_batch()
    reference = make_mlp()
    torch.nn.functional.cross_entropy(reference(inputs), labels).backward()
    exact = flat(parameter.grad for parameter in reference.parameters() if parameter.grad is not None)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
    OPTIMIZERS[name](reference.parameters()).step()

    accelerator = Fp16CpuAccelerator(mixed_precision="fp16", cpu=True, growth_interval=2)
    model, optimizer = accelerator.prepare(bare := make_mlp(), OPTIMIZERS[name](bare.parameters()))
    seen: list[torch.dtype] = []
    bare[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    scales, moved = [], []
    for _ in range(14):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        before, scale = flat(bare.parameters()), accelerator.scaler.get_scale()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale() / scale)
        moved.append(not torch.equal(flat(bare.parameters()), before))
        assert moved[-1] == torch.isfinite(norm).item()
        if moved.count(True) == 1 and moved[-1]:
            # the first update that is made is the one that float32 makes, the skipped ones having left no trace
            assert norm.item() == pytest.approx(exact.norm().item(), rel=5e-3)
            torch.testing.assert_close(flat(bare.parameters()), flat(reference.parameters()), rtol=0, atol=2e-4)

    skipped = moved.index(True)
    assert set(seen) == {torch.float16}
    assert skipped >= 4
    assert scales[:skipped] == [0.5] * skipped
    assert scales[skipped : skipped + 2] == [1.0, 2.0]  # growth_interval 2: the second good step doubles the scale
    assert moved[skipped : skipped + 2] == [True, True]
    assert not moved[skipped + 2]  # at the doubled scale the same batch overflows again


def test_other_precisions_have_no_scaler() -> None:
    assert Fp16CpuAccelerator(mixed_precision="no", cpu=True).scaler is None
    reset_accelerate_state()
    assert Fp16CpuAccelerator(mixed_precision="bf16", cpu=True).scaler is None
