"""One rank's stage in its several forms (training step, forward, each with dropout on or off) over one set of parameters.

The first form, the *base*, owns the parameters. A further form reads the same ones. Where ``fully_shard`` manages the base's segments,
gathered parameters exist only inside the base's forward, so a further form runs there: the base's segment is called (its hooks gather)
and hands over to the form's own segment, whose parameters are pointed at the gathered ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule

from runtime.parameters import Held, put_parameter
from runtime.stage import Stage


class Variants:
    """``module_for(stage)`` gives what to call for a form of the base stage."""

    def __init__(self, base: Stage) -> None:
        self.base = base
        self.current: Stage | None = None
        self.sharded = {name for name, module in base.module.named_modules() if isinstance(module, FSDPModule)}
        for name in self.sharded:
            self._divert(name, base.module.get_submodule(name))

    def install(self, stage: Stage, held: dict[str, Held]) -> Callable[..., Any]:
        """Point a further form at the base's parameters; returns what runs it."""
        gathered = {name for name, p in self.base.parameters.items() if p.fsdp}
        for name, planned in stage.parameters.items():
            if name not in gathered:
                put_parameter(stage.module, planned.path, held[name].parameter)
        if not self.sharded:
            return stage.module
        for name in self.sharded - {""}:
            if isinstance(getattr(stage.module, name, None), nn.Module):
                # keep the form's segment out of the way, call the base's in its place
                object.__setattr__(stage.module, f"own_{name}", stage.module.get_submodule(name))
                stage.module._modules[name] = self.base.module.get_submodule(name)
        return _Form(self, stage)

    def _divert(self, name: str, module: nn.Module) -> None:
        plain = module.forward

        def forward(*args: Any) -> Any:
            if self.current is None:
                return plain(*args)
            own: fx.GraphModule = getattr(self.current.module, f"own_{name}") if name else self.current.module
            self._point(own, name)
            return own.forward(*args)

        module.forward = forward

    def _point(self, own: nn.Module, name: str) -> None:
        """Let the form's segment read what is gathered now."""
        assert self.current is not None
        for parameter, planned in self.current.parameters.items():
            owner, _, leaf = planned.path.rpartition(".")
            if owner == name and self.base.parameters[parameter].fsdp:
                path, _, attribute = self.base.parameters[parameter].path.rpartition(".")
                own._parameters[leaf] = self.base.module.get_submodule(path)._parameters[attribute]


class _Form:
    """A further form under fully_shard: runs inside the base's forward."""

    def __init__(self, variants: Variants, stage: Stage) -> None:
        self.variants, self.stage = variants, stage
        base = variants.base.parameters
        # gathered at the root in this form, inside a segment in the base: gathered by hand around the call
        self.early = sorted(
            {base[n].path.rpartition(".")[0] for n, p in stage.parameters.items() if n in base and base[n].fsdp and p.path != base[n].path}
            - {""}
        )

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        root = self.variants.base.module
        modules = [m for path in self.early if isinstance(m := root.get_submodule(path), FSDPModule)]
        for module in modules:
            module.unshard()
        self.variants.current = self.stage
        try:
            return root(*args)
        finally:
            self.variants.current = None
            if not torch.is_grad_enabled():
                for owner in [*modules, root]:
                    if isinstance(owner, FSDPModule):
                        owner.reshard()
