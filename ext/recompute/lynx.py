"""Unit policies: a memory budget becomes a table for every layer, by HEU or OPT. No torch.

Published facts: Lynx (arXiv:2406.08756). The names follow the paper, the solvers are our own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pydantic import Field

from ext.recompute.policy import POLICIES, PolicyConfig, ProfiledPolicy
from ext.recompute.problem import Solution, StageProblem


class UnitPolicyConfig(PolicyConfig):
    """Options of every unit policy."""

    profile: str | None = Field(
        default=None, min_length=1, description="file of unit costs that an earlier run wrote; measured where absent"
    )


class UnitPolicy(ProfiledPolicy):
    """Decides unit by unit."""

    @abstractmethod
    def solve(self, problem: StageProblem) -> Solution:
        """Tables for the layers of a stage.

        Raises:
            InfeasibleBudget: no tables fit; says what would.
        """


@POLICIES.register("lynx_heu")
class LynxHeu(UnitPolicy):
    """One table for all equal layers of a stage, in milliseconds."""

    class Config(UnitPolicyConfig):
        type: Literal["lynx_heu"] = "lynx_heu"
        time_limit_s: float = Field(default=1.0, gt=0, description="seconds until a greedy table stands in")

    def solve(self, problem: StageProblem) -> Solution:
        # Reading a configuration must not import scipy.
        from ext.recompute.heu import solve_heu

        assert isinstance(self.config, LynxHeu.Config)
        return solve_heu(problem, time_limit=self.config.time_limit_s)


@POLICIES.register("lynx_opt")
class LynxOpt(UnitPolicy):
    """A table of its own for every layer, in seconds, with a bound on what better ones could gain."""

    class Config(UnitPolicyConfig):
        type: Literal["lynx_opt"] = "lynx_opt"
        time_limit_s: float = Field(default=10.0, gt=0, description="seconds of search per stage")

    def solve(self, problem: StageProblem) -> Solution:
        from ext.recompute.opt import solve_opt

        assert isinstance(self.config, LynxOpt.Config)
        return solve_opt(problem, time_limit=self.config.time_limit_s)
