"""Options of a router, torch-free: who is kept, which auxiliary loss, and balance by a bias."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ext.core.model import StrictModel

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RouterConfig(StrictModel):
    """Options under ``ext.moe.router``. The defaults leave everything as the host has it."""

    priority: Literal["host", "position", "batch", "probs", "random"] = Field(
        default="host", description="whom an expert keeps when more tokens want it than its capacity"
    )
    loss: Literal["host", "gshard", "load_importance", "none"] = Field(
        default="host", description="the auxiliary loss that the layer returns"
    )
    z_loss: NotNegative = Field(
        default=0.0,
        description="weight of the z-loss, added to the auxiliary loss",
    )
    bias_rate: NotNegative = Field(
        default=0.0, description="step of the bias that evens out the experts' load; 0 for none"
    )
    aux_loss_weight: NotNegative | None = Field(
        default=None,
        description="add this times the auxiliary loss to the training loss, whatever the model does with it",
    )
