"""The same GPT with every block, the embedding and the head shared by several ranks of a stage.

Each rank draws the weights of whole layers and keeps its part, so that every number of ranks builds the same model.
Dropout of whole tensors is the same on the ranks that share a layer; dropout of attention, where each has other heads,
comes from a stream that DeepSpeed's own checkpointing knows, too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ext.comm.tensor_parallel.sub_pipeline import Segment
from ext.comm.tensor_parallel.vocabulary import VocabParallelEmbedding, VocabularyRange, vocab_parallel_cross_entropy
from ext.recompute.units import LayerUnits
from gpt import model

STREAM = checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME
_SEED_OFFSET = 2718  # DeepSpeed's own distance between the streams of whole and of split tensors


class SharedEmbedding(VocabParallelEmbedding):
    """`model.TokenEmbedding` with its rows shared; as head it gives this rank's logits."""

    def __init__(self, vocab_size: int, hidden_size: int, group: TensorParallelGroup) -> None:
        super().__init__(model.TokenEmbedding(vocab_size, hidden_size).weight, group)


class SharedTransformerLayer(model.TransformerLayer):
    """`model.TransformerLayer` with its heads and its hidden units shared."""

    attention: Any  # shared ones in the place of whole ones
    mlp: Any

    def __init__(self, config: model.GPTConfig, group: TensorParallelGroup) -> None:
        super().__init__(config)
        self.group = group
        self.attention = _SharedAttention(self.attention, group)
        self.mlp = _SharedMlp(cast(model.Mlp, self.mlp), group)

    def units(self) -> LayerUnits:
        """Those of the whole layer; the ones that end in an all-reduce are never recomputed early."""
        reducing = ("residual", "out")
        units = super().units().units
        return LayerUnits(tuple(replace(unit, communication=unit.name in reducing) for unit in units))

    def segments(self) -> list[Segment]:
        """Attention and MLP, to be sub-pipelined."""
        out, contract = self.attention.out, self.mlp[2]
        return [
            Segment(self.attention_norm, self.attention.local, partial(self._merge, out)),
            Segment(self.mlp_norm, self.mlp.local, partial(self._merge, contract)),
        ]

    def _merge(self, linear: RowParallelLinear, hidden: Tensor, output: Tensor) -> Tensor:
        return hidden + self.dropout(linear.with_bias(output))


class _SharedMlp(model.Mlp):
    def __init__(self, whole: model.Mlp, group: TensorParallelGroup) -> None:
        up, activation, down = whole
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        nn.Sequential.__init__(self, ColumnParallelLinear(up, group), activation, RowParallelLinear(down, group))

    def local(self, hidden: Tensor) -> Tensor:
        """This rank's share of the output."""
        up, activation, down = self
        return cast(RowParallelLinear, down).local(activation(cast(ColumnParallelLinear, up).local(hidden)))


class _SharedAttention(model.Attention):
    qkv: Any  # parallel layers in the place of whole ones
    out: Any

    def __init__(self, whole: model.Attention, group: TensorParallelGroup) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.dropout = whole.num_heads // group.size, whole.dropout
        self.qkv = ColumnParallelLinear(whole.qkv, group, blocks=3)
        self.out = RowParallelLinear(whole.out, group)

    def local(self, hidden: Tensor) -> Tensor:
        """This rank's share of the output."""
        return self.out.local(self.mix(self.qkv.local(hidden)))

    def mix(self, qkv: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return super().mix(qkv)
        with checkpointing.get_cuda_rng_tracker().fork(STREAM):
            return super().mix(qkv)


def layers(config: model.GPTConfig, group: TensorParallelGroup) -> list[LayerSpec]:
    """`model.layers`, shared."""
    embedding = ("embedding", SharedEmbedding, config.vocab_size, config.hidden_size, group)
    return [
        TiedLayerSpec(*embedding),
        LayerSpec(model.Positions, config),
        *(LayerSpec(SharedTransformerLayer, config, group) for _ in range(config.num_layers)),
        LayerSpec(nn.LayerNorm, config.hidden_size),
        TiedLayerSpec(*embedding, forward_fn=SharedEmbedding.logits),
    ]


def build(
    config: model.GPTConfig,
    num_stages: int,
    tensor_parallel: int,
    seed: int,
    ds_config: dict[str, Any],
    sample_batch: tuple[Tensor, Tensor],
) -> PipelineModule:
    """This rank's part of this rank's stage. Every rank must call it; see `model.build`.

    Args:
        config: sizes of the whole model.
        num_stages: pipeline stages.
        tensor_parallel: ranks that share each stage; neighbours, so that they are on one node.
        seed: of the weights.
        ds_config: the whole ds_config.
        sample_batch: one micro-batch.
    """
    replicas = dist.get_world_size() // (num_stages * tensor_parallel)
    topology = PipeModelDataParallelTopology(num_pp=num_stages, num_mp=tensor_parallel, num_dp=replicas)
    group = _group_of(topology)
    loss = partial(loss_fn, vocabulary=VocabularyRange(config.vocab_size, group))
    blocks = SharedTransformerLayer.__name__
    return model.build_from(layers(config, group), loss, [blocks], seed, ds_config, sample_batch, topology=topology)


def loss_fn(logits: Tensor, labels: Tensor, *, vocabulary: VocabularyRange) -> Tensor:
    """`model.loss_fn` of logits that are shared."""
    return vocab_parallel_cross_entropy(logits, labels, vocabulary)


def seed_dropout(seed: int, tensor_parallel: int) -> None:
    """Set the default stream alike on the ranks that share layers, and one for split tensors on each rank apart."""
    rank = dist.get_rank()
    torch.manual_seed(seed + rank // tensor_parallel)
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    if tensor_parallel > 1:
        tracker.add(STREAM, seed + _SEED_OFFSET + rank)


def _group_of(topology: PipeModelDataParallelTopology) -> TensorParallelGroup:
    """A group of our own, so that no collective of the host comes between ours. Collective over the world."""
    mine: TensorParallelGroup | None = None
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = TensorParallelGroup.of(cast(dist.ProcessGroup, group))
    assert mine is not None
    return mine
