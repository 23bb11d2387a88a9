"""Text to .bin and .idx and back, through megatron-core's builder and reader."""

import json
import sys

import numpy as np
import pytest

import preprocess_data
from ext.core.errors import DataError
from gpt import corpus, tokenizer

BYTES = tokenizer.ByteTokenizer()


def _preprocess(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", *map(str, options)])
    return preprocess_data.main()


def _all(data):
    return np.concatenate([part.read(0, len(part)) for part in (data.train, data.validation)])


@pytest.fixture
def texts(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * (100 + i))
    return tmp_path


def test_the_pair_holds_the_tokens_of_the_text(texts, tmp_path_factory, monkeypatch, capsys):
    prefix = tmp_path_factory.mktemp("out") / "data.v1"
    assert _preprocess(monkeypatch, "--input", texts, "--output-prefix", prefix) == 0
    assert "30 documents" in capsys.readouterr().out
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["data.v1.bin", "data.v1.idx"]
    direct = corpus.find(texts).load(BYTES)
    for path in (prefix, prefix.with_name("data.v1.bin"), prefix.with_name("data.v1.idx")):
        data = corpus.find(path).load(BYTES)
        assert np.array_equal(_all(data), _all(direct))
        assert len(data.validation) == len(direct.validation)


def test_lines_of_jsonl_are_documents(tmp_path, monkeypatch, capsys):
    lines = [json.dumps({"body": text}) for text in ("ab", "c", "")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out"]
    assert _preprocess(monkeypatch, *options, "--json-key", "body") == 0
    assert _all(corpus.find(tmp_path / "out").load(BYTES)).tolist() == [97, 98, 256, 99, 256]
    assert _preprocess(monkeypatch, *options) == 3
    assert "in.jsonl, line 1" in capsys.readouterr().err


def test_a_failed_run_leaves_no_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "ab"}\nnonsense\n')
    assert _preprocess(monkeypatch, "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out") == 3
    assert "in.jsonl, line 2" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_shortened_pair_is_refused(texts, tmp_path_factory, monkeypatch):
    prefix = tmp_path_factory.mktemp("out") / "data"
    assert _preprocess(monkeypatch, "--input", texts, "--output-prefix", prefix) == 0
    content = prefix.with_name("data.bin").read_bytes()
    prefix.with_name("data.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"data\.bin has .* bytes, its index says"):
        corpus.find(prefix).load(BYTES)
    index = prefix.with_name("data.idx").read_bytes()
    for wrong in (b"nonsense", index[:40], b"x" * len(index)):
        prefix.with_name("data.idx").write_bytes(wrong)
        with pytest.raises(DataError, match=r"data\.idx is no index"):
            corpus.find(prefix).load(BYTES)
