"""Whatever is written into a ds_config, it is either read or refused with a key, never a traceback."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ext.config import ExtConfig, Problem, check_config, release
from ext.core.errors import ConfigError

WORDS = sorted({word for key in release.BUILT for word in key.split(".")} | {"type", "layers", "ext", "path"})
NAMES = sorted({name for entry in release.BUILT.values() if isinstance(entry, dict) for name in entry})
KEYS = st.sampled_from(WORDS) | st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.sampled_from(NAMES)
    | st.text(max_size=8)
)
JUNK = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))
BATCH = st.sampled_from(["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
CONFIGS = st.dictionaries(BATCH | st.sampled_from(["ext", "pipeline", "zero_optimization", "fp16", "Ext"]), JUNK)
NUMBERS = st.none() | st.integers(-1, 9)


@settings(max_examples=200, deadline=None)
@given(CONFIGS, JUNK, NUMBERS, NUMBERS, st.integers(-1, 4), NUMBERS)
def test_any_content(config, block, world_size, stages, tensor, layers):
    config = {**config, "ext": block}
    launch = {"world_size": world_size, "pipeline_stages": stages, "tensor_parallel": tensor, "num_layers": layers}
    found = check_config(config, **launch)
    assert all(isinstance(problem, Problem) and problem.key and problem.message for problem in found)
    refused = ()
    try:
        ExtConfig.from_ds_config(config)
    except ConfigError as error:
        refused = error.problems
    assert set(refused) <= {str(problem) for problem in found}


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | JUNK.map(str) | st.text(alphabet='{}[]:,"ext#/\n 1a', max_size=40))
def test_any_text(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "ds_config.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert all(problem.key and problem.message for problem in check_config(path))
