"""Loading a checkpoint, optimizer states included, at another expert-parallel size than it was saved at.

Files stay DeepSpeed's own. DeepSpeed itself loads expert weights at any size, but gives each rank the optimizer
file of the same expert-parallel rank, whose experts are others then. Here the states are found by global expert.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param_group
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor

from ext.core.errors import CheckpointError

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
_MASTER = "fp32 master weights"

States = dict[str, dict[str, Any]]
"""By global parameter name: its optimizer states, tensors flat."""


@dataclass(frozen=True)
class Saved:
    """The optimizer part of a checkpoint.

    Attributes:
        states: of every parameter of this pipeline stage.
        groups: param_groups of the optimizer, for their hyperparameters.
        partition: one ZeRO partition's dictionary, for what is not per parameter; None without ZeRO.
    """

    states: States
    groups: Sequence[Mapping[str, Any]]
    partition: Mapping[str, Any] | None = None


def load_across_expert_sizes(engine: Any) -> None:
    """Make ``engine.load_checkpoint`` take files of another ep_size; at the same one it is DeepSpeed's own."""
    host_load = engine.load_checkpoint

    def load_checkpoint(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        rest = (load_lr_scheduler_states, load_module_only, custom_load_fn)
        saved = None
        if load_optimizer_states and not load_module_only and not engine.load_universal_checkpoint():
            saved = _read_other_size(engine, load_dir, tag)
        if saved is None:
            return host_load(load_dir, tag, load_module_strict, load_optimizer_states, *rest)
        path, client_state = host_load(load_dir, tag, load_module_strict, False, *rest)
        _restore(engine, saved)
        return path, {key: value for key, value in client_state.items() if key != "optimizer"}

    engine.load_checkpoint = load_checkpoint


def _read_other_size(engine: Any, load_dir: str, tag: str | None) -> Saved | None:
    """What a checkpoint of another ep_size holds; None where DeepSpeed can load it, or will say why not.

    Raises:
        CheckpointError: the states cannot be told apart, or this optimizer's cannot be moved.
    """
    latest = Path(load_dir) / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    model_file = Path(engine._get_ckpt_name(load_dir, tag))
    if tag is None or not model_file.is_file():
        return None
    model_state = _load(model_file)
    experts = _Experts.of(engine.module)
    if engine.zero_optimization():
        names = [name for group in model_state.get("param_shapes") or [] for name in group]
        files = [
            Path(
                engine._get_rank_zero_ckpt_name(
                    load_dir, tag, engine.checkpoint_mp_rank, rank, engine.bfloat16_enabled()
                )
            )
            for rank in range(model_state["dp_world_size"])
        ]
        saved_size = experts.ep_size_of(names)
    else:
        pattern = f"expp_rank_*_mp_rank_{engine.checkpoint_mp_rank:02d}_optim_states.pt"
        count = len(list((Path(load_dir) / str(tag)).glob(pattern)))
        files = [Path(engine._get_optimizer_ckpt_name(load_dir, tag, rank)) for rank in range(count)]
        saved_size = count
    if saved_size in (0, experts.ep_size) or not all(file.is_file() for file in files):
        return None
    where = f"{model_file.parent}: saved at ep_size {saved_size}, this run has {experts.ep_size}"
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return _read_partitions(files, experts, saved_size, engine._config.use_data_before_expert_parallel_)
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        raise CheckpointError(
            f"{where}: the states of {type(engine.optimizer).__name__} cannot be moved to other ranks. Save with "
            f"ZeRO stage 1, load with ep_size {saved_size}, or load with load_optimizer_states=False."
        )
    return _read_whole(files, engine, experts, saved_size, where)


@dataclass(frozen=True)
class _Experts:
    """The expert parameters of this rank's model.

    Attributes:
        num_experts: of each layer, by the prefix of its experts' parameters.
        ep_size: of this run.
        ep_rank: of this rank.
    """

    num_experts: Mapping[str, int]
    ep_size: int
    ep_rank: int

    @classmethod
    def of(cls, module: Any) -> _Experts:
        """Raises:
        CheckpointError: the layers differ in ep_size, so that a file's rank says nothing.
        """
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, MoE)}
        sizes = {layer.ep_size: layer.expert_group_name for layer in layers.values()}
        if len(sizes) > 1:
            raise CheckpointError(
                f"the MoE layers have ep_size {', '.join(map(str, sorted(sizes)))}; optimizer states can be moved "
                "between ranks only where all have one. Load with load_optimizer_states=False."
            )
        ((ep_size, group),) = sizes.items()
        prefixes = {
            f"{name}.deepspeed_moe.experts.deepspeed_experts.": layer.num_experts for name, layer in layers.items()
        }
        return cls(prefixes, ep_size, groups._get_expert_parallel_rank(group))

    def ep_size_of(self, names: Sequence[str]) -> int:
        """The ep_size of a run whose rank 0 has parameters of these names; 0 if none is an expert's."""
        sizes = set()
        for prefix, count in self.num_experts.items():
            local = {int(match[2]) for match in map(_EXPERT.fullmatch, names) if match and match[1] == prefix}
            sizes.add(count // len(local) if local else 0)
        return max(sizes)

    def global_name(self, name: str, ep_size: int, ep_rank: int) -> str:
        """The name with the expert's number among all experts of its layer."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return name
        prefix, local, suffix = match.groups()
        return f"{prefix}{int(local) + ep_rank * (self.num_experts[prefix] // ep_size)}{suffix}"


def _read_partitions(files: Sequence[Path], experts: _Experts, ep_size: int, data_before_expert: bool) -> Saved:
    """ZeRO 1 and 2: a file per data-parallel rank; a parameter is the pieces of its ranks, one after another."""
    pieces: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    param_groups, partition = [], {}
    for rank, file in enumerate(files):
        ep_rank = rank // (len(files) // ep_size) if data_before_expert else rank % ep_size
        partition = _load(file)[OPTIMIZER_STATE_DICT]
        base = partition[BASE_OPTIMIZER_STATE]
        if isinstance(base, dict):
            param_groups = base["param_groups"]
        for index, addresses in enumerate(partition[PARAM_SLICE_MAPPINGS]):
            flat = partition[SINGLE_PARTITION_OF_FP32_GROUPS][index]
            states = base["state"].get(index, {}) if isinstance(base, dict) else base[index]
            for name, address in addresses.items():
                target = pieces[experts.global_name(name, ep_size, ep_rank)]
                target[_MASTER].append(flat.narrow(0, address.start, address.numel))
                for key, value in states.items():
                    is_flat = torch.is_tensor(value) and value.dim() > 0
                    target[key].append(value.narrow(0, address.start, address.numel) if is_flat else value)
    joined = {
        name: {key: torch.cat(parts) if _is_flat(parts[0]) else parts[0] for key, parts in states.items()}
        for name, states in pieces.items()
    }
    return Saved(joined, param_groups, partition)


def _read_whole(files: Sequence[Path], engine: Any, experts: _Experts, ep_size: int, where: str) -> Saved:
    """Without ZeRO: a file per expert-parallel rank, its parameters in the order of the model, by number only."""
    dense = [name for name, is_expert in _optimized(engine) if not is_expert]
    states: States = {}
    param_groups: list[Any] = []
    for ep_rank, file in enumerate(files):
        optimizer = _load(file)["optimizer"]
        param_groups = optimizer["param_groups"]
        numbers = {kind: _numbers(param_groups, kind) for kind in (False, True)}
        names = {False: dense, True: list(_expert_names(engine, experts, ep_size))}
        for kind, of_kind in names.items():
            if len(of_kind) != len(numbers[kind]):
                what = "expert" if kind else "other"
                raise CheckpointError(
                    f"{where}: {file.name} holds states of {len(numbers[kind])} {what} parameters, the model has "
                    f"{len(of_kind)} there. Load with load_optimizer_states=False."
                )
            for name, number in zip(of_kind, numbers[kind], strict=True):
                state = optimizer["state"].get(number, {})
                states[experts.global_name(name, ep_size, ep_rank)] = {
                    key: value.flatten() if _is_flat(value) else value for key, value in state.items()
                }
    return Saved(states, param_groups)


def _numbers(param_groups: Sequence[Mapping[str, Any]], is_expert: bool) -> list[int]:
    return [n for group in param_groups if is_moe_param_group(group) == is_expert for n in group["params"]]


def _optimized(engine: Any) -> Iterator[tuple[str, bool]]:
    """Names of the parameters in the optimizer, in its order, and whether each is an expert's."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], is_moe_param_group(group)


def _expert_names(engine: Any, experts: _Experts, ep_size: int) -> Iterator[str]:
    """Local names of the expert parameters on a rank of a run with ``ep_size``, in the optimizer's order."""
    suffixes: dict[str, list[str]] = defaultdict(list)
    for name, is_expert in _optimized(engine):
        match = _EXPERT.fullmatch(name) if is_expert else None
        if match and int(match[2]) == 0:
            suffixes[match[1]].append(match[3])
    for prefix, of_layer in suffixes.items():
        for local in range(experts.num_experts[prefix] // ep_size):
            yield from (f"{prefix}{local}{suffix}" for suffix in of_layer)


def _restore(engine: Any, saved: Saved) -> None:
    """Put the states where this run has their parameters."""
    experts = _Experts.of(engine.module)
    optimizer = engine.optimizer
    names = {
        parameter: experts.global_name(n, experts.ep_size, experts.ep_rank)
        for n, parameter in engine.module.named_parameters()
    }
    for group in optimizer.param_groups:
        like = [g for g in saved.groups if is_moe_param_group(g) == is_moe_param_group(group)]
        group.update({k: v for k, v in like[0].items() if k not in ("params", "name", "moe")} if like else {})
    if saved.partition is None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    key: value.view_as(parameter).to(parameter, copy=True) if _is_flat(value) else value
                    for key, value in _states_of(saved, names[parameter]).items()
                }
        return
    optimizer._load_global_state(saved.partition)
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        for parameter in optimizer.bit16_groups[index]:
            if parameter._hp_mapping is not None:
                _restore_fragment(optimizer.optimizer.state[flat], flat, parameter, _states_of(saved, names[parameter]))


def _restore_fragment(state: dict[str, Any], flat: Tensor, parameter: Any, saved: Mapping[str, Any]) -> None:
    """The piece of one parameter that lies in this rank's flat partition."""
    here, there = parameter._hp_mapping.hp_fragment_address, parameter._hp_mapping.lp_fragment_address
    for key, value in saved.items():
        if not _is_flat(value):
            state[key] = value.clone() if torch.is_tensor(value) else value
            continue
        target = flat.data if key == _MASTER else state.setdefault(key, torch.zeros_like(flat.data))
        target.narrow(0, here.start, here.numel).copy_(value.narrow(0, there.start, there.numel))


def _states_of(saved: Saved, name: str) -> Mapping[str, Any]:
    if name not in saved.states:
        raise CheckpointError(
            f"the checkpoint holds no optimizer states of {name}. Load with load_optimizer_states=False."
        )
    return saved.states[name]


def _is_flat(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _load(file: Path) -> Any:
    """As DeepSpeed reads its own files; tensors stay on disk until they are used."""
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
