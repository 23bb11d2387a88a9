"""The schedules of this package, one file each; importing this module registers all of them."""

from ext.pipeline.schedules import (  # noqa: F401 - imported to register
    auto,
    early_recompute,
    gpipe,
    last_no_recompute,
    one_f_one_b,
    plan_file,
    shifted_critical_path,
    zb_h1,
)
