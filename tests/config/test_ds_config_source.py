"""Reading a ds_config: what DeepSpeed takes is taken, what it refuses is refused with file, line and column."""

import base64
import json
import subprocess
import sys

import hjson
import pytest

from ext.config import ExtConfig, read_ds_config
from ext.config.source import MAX_BYTES, UnreadableConfig
from ext.core.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def to_file(content, name="ds_config.json"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to_file


def refusal(config):
    with pytest.raises(UnreadableConfig) as caught:
        read_ds_config(config)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value) == f"{caught.value.problem.key}: {caught.value.problem.message}"
    return caught.value.problem


GOOD = [
    '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}',
    '\ufeff{"train_batch_size": 8, "zero_optimization": {"stage": 1}}',
    '{"train_batch_size": 8, # why\n "zero_optimization": {"stage": 1,},}',
    '// first\n{"train_batch_size": 8.0, /* second\n */ "zero_optimization": {stage: 1}}',
    "train_batch_size: 8\nzero_optimization: {\n stage: 1\n}",
]


@pytest.mark.parametrize("text", GOOD)
def test_takes_what_deepspeed_takes(write, text):
    path = write(text)
    expected = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    assert read_ds_config(path) == read_ds_config(str(path)) == expected
    assert read_ds_config(base64.urlsafe_b64encode(b'{"train_batch_size": 8}').decode()) == {"train_batch_size": 8}


@pytest.mark.parametrize("text", GOOD)
def test_reads_as_deepspeed_does(write, text):
    assert read_ds_config(write(text)) == hjson.loads(text)


def test_a_dictionary_is_itself():
    config = {"train_batch_size": 8}
    assert read_ds_config(config) is config


def test_a_number_written_with_a_point_is_whole_as_for_deepspeed(write):
    path = write('{"ext": {"recompute": {"policy": [1.0, 2]}}}')
    config = ExtConfig.from_ds_config(path)
    assert config.recompute.policy.layers == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "a": 1,\n "a": 2}', "line 3, column 2: key 'a' stands twice in one object. Remove one."),
        (
            '{"fp16": {"enabled": 1}, "ext": {"enabled": true,\n  "enabled": false}}',
            "line 2, column 3: key 'enabled' stands twice in one object. Remove one.",
        ),
        ('// "a": 0\n{"a": 1, # "a": 2\n  a: 3}', "line 3, column 3: key 'a' stands twice in one object. Remove one."),
        (
            '{"a": [{"b": 1}, {"b": 1,\n"b": 2}], "b": 3}',
            "line 2, column 1: key 'b' stands twice in one object. Remove one.",
        ),
        ('{"a": {"b": 1},\n"a": 2}', "line 2, column 1: key 'a' stands twice in one object. Remove one."),
        ('{"a": 1', "line 1, column 8: Expecting ',' delimiter."),
        ('\ufeff{"a": 1', "line 1, column 8: Expecting ',' delimiter."),
        ('// "x\n{"a": 1 "b": 2}', "line 2, column 9: Expecting ',' delimiter."),
        ('{\n"a": 1 "b": 2}', "line 2, column 8: Expecting ',' delimiter."),
        ('{"a" 1}', "line 1, column 6: Expecting ':' delimiter."),
        ('{"a": 1}}', "line 1, column 9: Extra data."),
        ('{"a": NaN}', "line 1, column 11: NaN is no JSON number."),
        ('{\n"a": gpipe}', "line 2, column 6: Expecting value."),
        ("", "empty. A ds_config is a JSON object."),
        (" \n\t", "empty. A ds_config is a JSON object."),
        ("[1]", "holds [1]; allowed: a JSON object."),
        ('"x"', 'holds "x"; allowed: a JSON object.'),
        ("null", "holds null; allowed: a JSON object."),
        ("[" * 50_000, "nested too deeply to be a ds_config."),
        ('{"a":' * 50_000, "nested too deeply to be a ds_config."),
        ('{"a": 1e999}', "cannot convert float infinity to integer."),
        (b'{"a":\n "\xe9"}', "line 2, column 3: byte 0xe9 is not UTF-8. Save the file as UTF-8."),
        ('{"a": 1}'.encode("utf-16"), "line 1, column 1: byte 0xff is not UTF-8. Save the file as UTF-8."),
    ],
)
def test_refuses_with_file_line_and_column(write, text, message):
    path = write(text)
    problem = refusal(path)
    assert problem.key == str(path)
    assert problem.message == message


def test_a_number_without_end(write):
    assert "9999" not in refusal(write('{"a": ' + "9" * 10_000 + "}")).message


def test_many_duplicates_are_all_named(write):
    message = refusal(write('{"a": 1, "b": 2,\n"b": 3,\n"a": 4}')).message
    assert message == (
        "line 3, column 1: key 'a' stands twice in one object; line 2, column 1: key 'b' stands twice in one object. "
        "Remove one."
    )


@pytest.mark.parametrize("config", [5, None, ["a"], 1.5, b"{}", object()])
def test_other_types(config):
    problem = refusal(config)
    assert problem.key == "ds_config"
    assert problem.message.endswith("; allowed: a dictionary, a path, or base64 text of JSON.")


@pytest.mark.parametrize("name", ["no_such.json", "ds_config", "/no/such/folder/x.json", "a\0b", "x" * 5000])
def test_no_such_file(name):
    problem = refusal(name)
    assert problem == type(problem)(name[:200], "no such file. Give the path of a ds_config in JSON.")


def test_an_empty_name():
    assert refusal("").message.startswith("found an empty text; allowed: ")


def test_a_folder(tmp_path):
    assert refusal(tmp_path).message == "Is a directory. Give the path of a ds_config in JSON."


def test_a_file_that_is_no_config_is_not_read_to_its_end(write):
    assert refusal("/dev/zero").message == "larger than 16 MiB, so no ds_config. Give the path of one."
    path = write(b" " * (MAX_BYTES + 1))
    assert refusal(path).message == "larger than 16 MiB, so no ds_config. Give the path of one."


def test_broken_base64():
    problem = refusal(base64.urlsafe_b64encode(b'{"a": 1').decode())
    assert (problem.key, problem.message) == ("base64 ds_config", "line 1, column 8: Expecting ',' delimiter.")


def test_every_json_file_keeps_its_content(write):
    content = {"a": [1, 2.5, None, True, "x // no comment", 'quo"te', "#no"], "b": {"c": {}}}
    assert read_ds_config(write(json.dumps(content, indent=2))) == content


def test_needs_no_torch():
    code = "import ext.config, sys; print([name for name in ('torch', 'deepspeed', 'megatron') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
