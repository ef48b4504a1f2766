"""Device memory of a run, estimated without the device, the weights, or the memory itself.

A copy of the model is built from its configuration out of fake tensors, which have shapes and no data. Forward,
backward and update run on it for real, so that no architecture needs a formula, and the bytes alive are followed
operation by operation. What a kernel allocates and frees inside one operation is not seen.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accumft.errors import UserError
from accumft.models import enable_gradient_checkpointing
from accumft.packing import IMPLEMENTATION as PACKED

GIB = 2**30

# What a GPU loses to others than tensors. The context: the driver's and CUDA's own, the kernels of torch and cuBLAS and
# the latter's workspace, 0.4 to 0.6 GiB on cards from V100 to H200.
CONTEXT_BYTES = round(0.6 * GIB)
# NCCL's channels and buffers, once there is more than one process.
COMMUNICATION_BYTES = round(0.25 * GIB)
# The caching allocator's blocks fit micro-batches of one length and are split by those of another: what is reserved
# exceeds what is in use by a few per cent, up to about ten.
FRAGMENTATION = 0.10
# Of "16 GB" a V100 shows 15.8 GiB, of "80 GB" an A100 or H100 79.2: the rest is the driver's.
VISIBLE_SHARE = 0.985


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device at the peak of an optimizer step."""

    weights: int
    """Parameters in float32, and buffers."""
    gradients: int
    """Gradients, allocated during the whole window."""
    optimizer: int
    """State of the optimizer between steps."""
    activations: int
    """Peak over forward and backward of all else: what is kept for the backward, casted weights, inputs, what lives for
    a moment."""
    update: int
    """Peak of what the optimizer's update allocates for a moment, after the activations are gone."""

    @property
    def total(self) -> int:
        """Bytes at the peak: the activations and the update do not meet."""
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.update)

    def needed(self, num_processes: int = 1) -> int:
        """Bytes that a GPU must have: the total, its fragmentation, the context, and NCCL's from two processes on."""
        communication = COMMUNICATION_BYTES if num_processes > 1 else 0
        return round(self.total * (1 + FRAGMENTATION)) + CONTEXT_BYTES + communication


def fits(estimate: MemoryEstimate, device_memory_gb: float, num_processes: int = 1) -> bool:
    """Whether the estimate and a GPU's reserve (see the constants above) fit into a card sold as `device_memory_gb`."""
    return estimate.needed(num_processes) <= device_memory_gb * GIB * VISIBLE_SHARE


def estimate_memory(
    model_or_config: Any,
    rows: int,
    length: int,
    *,
    optim: Literal["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"] = "adamw_torch_fused",
    mixed_precision: Literal["no", "fp16", "bf16"] = "no",
    gradient_checkpointing: bool = False,
    num_labels: int | None = None,
    sgd_momentum: float = 0.0,
    device: Literal["cuda", "cpu"] = "cuda",
) -> MemoryEstimate:
    """Estimates the memory of a training step, on any machine, in seconds and without touching the weights.

    Accelerators without SDPA's fused kernels, and what `torch.compile` fuses, are not modelled.

    Args:
        model_or_config: a transformers model, left as it is: its class, configuration and frozen parameters count; or a
            configuration, for `AutoModelForSequenceClassification`.
        rows: examples in the largest micro-batch (in padded tokens).
        length: tokens of each, padding included.
        optim: as in the recipe.
        mixed_precision: autocast of the forward; weights, gradients and optimizer stay in float32.
        num_labels: outputs of the head; None: as the configuration says.
        sgd_momentum: as in the recipe.
        device: with dropout in attention, a CPU keeps rows × heads × length² for each layer, and a GPU with SDPA
            nothing; GPUs update all parameters at once where the optimizer is not fused, a CPU one by one.

    Raises:
        UserError: the model does not run without data or on this length, or has no gradient checkpointing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if rows < 1 or length < 1:
        raise ValueError(f"rows {rows}, length {length}: must be at least 1")
    model = _bare_model(model_or_config, num_labels, device)
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    # `torch.device` overrides a default device that the caller may have set.
    with FakeTensorMode(), torch.device("cpu"), torch.enable_grad():
        _make_fake(model)
        weights = _bytes(model.parameters()) + _bytes(model.buffers())
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = _bytes(trainable)
        try:
            activations = _activations(model, rows, length, mixed_precision)
        except RuntimeError as error:
            # Above all where what is computed depends on the data: `if mask.any()`, experts.
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"{type(model).__name__}: its memory cannot be estimated, as it does not run without data on {rows} x "
                f"{length} tokens ({reason}); measure it on the device"
            ) from error
    state, update = _update([parameter.shape for parameter in trainable], optim, sgd_momentum, device)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=state,
        activations=activations,
        update=update,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _bare_model(model_or_config: Any, num_labels: int | None, device: str) -> Any:
    """A model of the same class, configuration and frozen parameters, in training mode, on the meta device."""
    given = model_or_config if isinstance(model_or_config, nn.Module) else None
    config: Any = copy.deepcopy(model_or_config if given is None else given.config)
    if getattr(config, "_attn_implementation", None) == PACKED:
        config._attn_implementation = "sdpa"  # which it is, rectangle by rectangle
    if num_labels is not None:
        config.num_labels = num_labels
    if getattr(config, "pad_token_id", None) is None:
        # Heads of decoders refuse more than one row without; `accumft.pretrained.choose_padding` sets it in a run.
        config.pad_token_id = 0
    model = _build(given, config)
    if device == "cuda" and model.config._attn_implementation == "sdpa" and _without_attention_dropout(config):
        # Fake tensors take the CPU's way, where SDPA with dropout keeps all that a GPU's kernel draws again.
        model = _build(given, config)
    if given is not None:
        frozen = {name for name, parameter in given.named_parameters() if not parameter.requires_grad}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    return model.train()


def _build(given: nn.Module | None, config: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    # On the meta device nothing is initialised, which takes time, random numbers, and sometimes data.
    with torch.device("meta"):
        if given is not None:
            return type(given)(config)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def _make_fake(model: nn.Module) -> None:
    """Gives every parameter and buffer a storage of its own, in place; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and id(tensor) not in made:
                new = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
            # Sets the entry of module._parameters or module._buffers, whichever has the name.
            setattr(module, name, None if tensor is None else made[id(tensor)])


def _without_attention_dropout(config: Any) -> bool:
    """Sets attention_probs_dropout_prob, attention_dropout, attn_pdrop … to 0, in place; whether one was not."""
    names = [name for name, value in config.to_dict().items() if "att" in name and "drop" in name and value]
    for name in names:
        setattr(config, name, 0.0)
    return bool(names)


class _LiveBytes(TorchDispatchMode):
    """Follows the bytes of the storages that operations make inside the context, from birth to death."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """known: tensors whose storages do not count."""
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._storages:
            return

        def forget(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def _activations(model: Any, rows: int, length: int, mixed_precision: str) -> int:
    """Peak bytes of a micro-batch's forward and backward beyond weights and gradients."""
    positions = getattr(model.config, "max_position_embeddings", None) or length
    if length > positions:  # an example of several texts (accumft.data.pair_batches)
        rows, length = -(-rows * length // positions), positions
    for parameter in model.parameters():
        if parameter.requires_grad:
            # As from the second micro-batch of a window on: new gradients are added to those that are there.
            parameter.grad = torch.empty_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # Fake tensors have no data: bfloat16 on the CPU stands for both, of two bytes each.
    autocast = nullcontext() if mixed_precision == "no" else torch.autocast("cpu", torch.bfloat16)
    with _LiveBytes([*model.parameters(), *model.buffers(), *gradients]) as memory:
        # A row of an encoder-decoder has its tokens on both sides: here half on each.
        sides = 2 if getattr(model.config, "is_encoder_decoder", False) else 1
        input_ids = torch.zeros(rows, -(-length // sides), dtype=torch.long)
        # transformers cannot see that nothing is padded, and makes a mask for attention, as for most real batches.
        batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if sides == 2:
            batch |= {"decoder_input_ids": input_ids, "decoder_attention_mask": batch["attention_mask"]}
        if getattr(model, "main_input_name", "") == "pixel_values":
            # `length` is what an image counts in the plan; the configuration says its side (tasks.image_models).
            batch = {"pixel_values": torch.zeros(rows, 3, model.config.image_size, model.config.image_size)}
        with autocast:
            logits = _logits(model(**batch))
        # What Accelerate does at the end of the forward, and the loss outside of autocast.
        logits = logits.float().flatten(0, -2)
        labels = torch.zeros(len(logits), dtype=torch.long)
        nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    return memory.peak


def _logits(output: Any) -> torch.Tensor:
    """Of an encoder without a head its states. What else a model returns must not live on."""
    logits: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
    return logits


def _update(shapes: list[torch.Size], optim: str, sgd_momentum: float, device: str) -> tuple[int, int]:
    """Bytes of the optimizer's state, and of what an update allocates for a moment: one on the meta device."""
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    # The decay's size is no matter, but whether there is one.
    foreach, weight_decay = device == "cuda", 0.01
    optimizer: torch.optim.Optimizer
    if optim in ("adamw_torch", "adamw_torch_fused"):
        optimizer = torch.optim.AdamW(parameters, weight_decay=weight_decay, foreach=foreach)
    elif optim == "sgd":
        optimizer = torch.optim.SGD(parameters, 0.1, sgd_momentum, weight_decay=weight_decay, foreach=foreach)
    elif optim == "adafactor":
        from transformers.optimization import Adafactor

        optimizer = Adafactor(parameters, lr=0.1, weight_decay=weight_decay, scale_parameter=False, relative_step=False)
    else:
        raise ValueError(f"optim {optim}: its memory is not known")
    with _LiveBytes([*parameters, *(p.grad for p in parameters if p.grad is not None)]) as memory:
        optimizer.step()
    # The fused kernel has the state of the other, and works in place.
    transient = 0 if optim == "adamw_torch_fused" else memory.peak - memory.live
    return memory.live, transient
