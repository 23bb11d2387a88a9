"""A GPT as layer profiles, from formulas: what a run would measure, before there is one."""

from __future__ import annotations

from ext.cost.hardware import Device
from ext.cost.profile import Deferral, LayerProfile
from ext.cost.transformer import TransformerShape

FP32 = 4


def gpt_profile(
    shape: TransformerShape,
    micro_batch: int,
    device: Device,
    *,
    flash: bool = True,
    dropout: bool = True,
    tied: bool = True,
    tensor_parallel: int = 1,
) -> list[LayerProfile]:
    """Embedding, the transformer layers, and the head with its norm and loss, in order.

    Activations of a layer are those of Korthikanti et al. (arXiv:2205.05198, section 4.1), 34 s b h + 5 a s^2 b
    bytes in 16 bit, without the second term where attention is fused. The head keeps its input, the normed input and
    the fp32 log-probabilities. A matrix product's two gradients cost a forward each; what attention itself does has
    no weight gradient. Times count operations only, at the device's efficiency; no communication.

    Args:
        shape: of the model.
        micro_batch: samples.
        device: for the times.
        flash: whether attention keeps no (seq, seq) matrices.
        dropout: whether masks of one byte per element are kept.
        tied: whether the head shares the embedding's weight, of which first and last stage hold a copy each.
        tensor_parallel: ranks that share every layer; what is not shared is kept whole.
    """
    e, h, t = shape.bytes_per_element, shape.hidden_size, tensor_parallel
    tokens = micro_batch * shape.seq_length
    vector = tokens * h * e
    block = _block(shape, micro_batch, device, flash=flash, dropout=dropout, tensor_parallel=t)
    words = shape.vocab_size * h // t
    tie = (("embedding", words),) if tied else ()
    embedding = LayerProfile(
        name="Embedding",
        forward=device.memory_time(2 * vector),
        recompute=device.memory_time(2 * vector),
        input_grad=0.0,
        weight_grad=device.memory_time(3 * vector),
        storages=(tokens * 8, vector),
        inputs=(0,),
        outputs=(1,),
        saved=(0,),
        transient=words * e,
        trained=words + shape.seq_length * h,
        tied=tie,
        recomputable=False,
        deferral=Deferral((), 0),
    )
    time = device.compute_time(shape.head_flops(micro_batch) / t)
    logits = tokens * shape.vocab_size // t
    head = LayerProfile(
        name="Head",
        forward=time,
        recompute=time,
        input_grad=time,
        weight_grad=time,
        storages=(vector, vector, logits * FP32, FP32),
        inputs=(0,),
        outputs=(3,),
        saved=(0, 1, 2),
        transient=logits * (2 * FP32 + e),
        trained=words + 2 * h,
        tied=tie,
        recomputable=False,
        # The normed input and the gradient of the logits, which takes the place of the log-probabilities.
        deferral=Deferral((), vector + logits * e),
    )
    return [embedding, *(block for _ in range(shape.num_layers)), head]


def _block(
    shape: TransformerShape, micro_batch: int, device: Device, *, flash: bool, dropout: bool, tensor_parallel: int
) -> LayerProfile:
    e, h, t = shape.bytes_per_element, shape.hidden_size, tensor_parallel
    tokens = micro_batch * shape.seq_length
    vector = tokens * h * e
    wide = tokens * shape.ffn_size * e
    scores = micro_batch * shape.num_heads * shape.seq_length**2
    # Whole on every rank: both norms' inputs and outputs, of which the first input is the layer's, and two masks.
    mask = tokens * h if dropout else 0
    whole = 3 * vector + 2 * mask
    # Shared by the ranks: query, key, value and what attention gives; what GELU takes and gives.
    shared = 4 * vector + 2 * wide
    if not flash:
        shared += scores * (2 * e + (1 if dropout else 0))
    flops = shape.layer_flops(micro_batch)
    attention = 4.0 * tokens * shape.seq_length * h
    forward = device.compute_time(flops / t)
    return LayerProfile(
        name="TransformerLayer",
        forward=forward,
        recompute=forward,
        input_grad=device.compute_time((flops + attention) / t),
        weight_grad=device.compute_time((flops - attention) / t),
        storages=(vector, whole + shared // t, vector),
        inputs=(0,),
        outputs=(2,),
        saved=(0, 1),
        transient=2 * wide // t + vector,
        trained=(shape.layer_parameters - 6 * h) // t + 6 * h,
        # Inputs of four products: two normed ones, what attention and GELU give; and the gradients of their outputs.
        # The last product's is there before anything but a mask has gone.
        deferral=Deferral((), 4 * vector + (4 * vector + 2 * wide) // t, growth=vector - mask),
    )
