"""The one reader of ds_config's ``"ext"`` block: strict models, what a release has built, checks before launch."""

from ext.config.check import check_config
from ext.config.model import ExtConfig
from ext.config.problems import Problem
from ext.config.source import read_ds_config

__all__ = ["ExtConfig", "Problem", "check_config", "read_ds_config"]
