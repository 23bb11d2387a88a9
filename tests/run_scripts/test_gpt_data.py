"""Corpus, tokenizers and sampling: deterministic, disjoint, resumable, and clear about bad paths."""

import json

import numpy as np
import pytest
import torch

from ext.core.errors import ConfigError, DataError
from gpt import corpus, sampling, tokenizer
from gpt.sampling import BatchShape, Sampler

BYTES = tokenizer.ByteTokenizer()


def _corpus(num_tokens):
    return corpus.Corpus.split(corpus.ArrayTokens(np.arange(num_tokens) % 251), np.array([0]))


def _folder(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


class TestFind:
    def test_default_is_the_standard_library_without_its_tests(self):
        source = corpus.find(None)
        assert "json/decoder.py" in source.names
        assert all(name.endswith(".py") and not name.startswith(("test/", "site-packages/")) for name in source.names)

    def test_folder_gives_visible_text_files(self, tmp_path):
        files = {"a.txt": b"a", "deep/b.md": b"b", ".hidden": b"h", "empty.txt": b"", "image.png": b"\x89\0\0"}
        assert sorted(corpus.find(_folder(tmp_path, files)).names) == ["a.txt", "deep/b.md"]

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("missing.txt", None, "does not exist"),
            ("empty.txt", b"", "is empty"),
            ("zeros.txt", b"\0\0\0", "no text"),
            ("half.bin", b"x", "half.idx is missing"),
        ],
    )
    def test_refuses_a_file_that_is_no_text(self, tmp_path, name, content, says):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=says):
            corpus.find(tmp_path / name)

    def test_refuses_a_folder_without_text(self, tmp_path):
        with pytest.raises(DataError, match="no text file"):
            corpus.find(_folder(tmp_path, {"a.txt": b"", ".b": b"b"}))

    def test_names_a_link_that_leads_nowhere(self, tmp_path):
        (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
        with pytest.raises(DataError, match=r"link\.txt"):
            corpus.find(tmp_path / "link.txt")


class TestSplit:
    def test_every_byte_of_every_file_is_in_one_part(self, tmp_path):
        files = {f"{i}.txt": bytes([i]) * 100 for i in range(1, 41)}
        data = corpus.find(_folder(tmp_path, files)).load(BYTES)
        train, validation = (part.read(0, len(part)) for part in (data.train, data.validation))
        assert sorted(np.concatenate((train, validation))) == sorted([*b"".join(files.values()), *[BYTES.eod] * 40])
        assert len(validation) == 2 * 101  # 5 %, in whole files

    def test_no_file_is_in_both_parts(self, tmp_path):
        data = corpus.find(_folder(tmp_path, {f"{i}.txt": bytes([i]) * (50 + i) for i in range(30)})).load(BYTES)
        train, validation = (set(part.read(0, len(part))) - {BYTES.eod} for part in (data.train, data.validation))
        assert train
        assert validation
        assert not train & validation

    def test_depends_on_names_not_on_the_order_on_disk(self, tmp_path):
        files = {f"{i}.txt": bytes([i]) * 100 for i in range(40)}
        first = corpus.find(_folder(tmp_path / "a", files)).load(BYTES)
        second = corpus.find(_folder(tmp_path / "b", dict(reversed(files.items())))).load(BYTES)
        assert np.array_equal(first.validation.read(0, 10**6), second.validation.read(0, 10**6))

    def test_one_file_is_cut_in_two(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"x" * 999)
        data = corpus.find(tmp_path / "a.txt").load(BYTES)
        assert (len(data.train), len(data.validation)) == (950, 50)


class TestSampler:
    SHAPE = BatchShape(sequence_length=8, micro_batch_size=2, num_microbatches=3)

    def test_labels_are_the_tokens_one_later(self):
        for tokens, labels in Sampler(_corpus(5000).train, self.SHAPE, 0, seed=1).batches(4):
            assert tokens.shape == labels.shape == (2, 8)
            assert torch.equal(tokens[:, 1:], labels[:, :-1])

    def test_a_step_depends_on_seed_and_step_alone(self):
        tokens = _corpus(5000).train
        fresh = [list(Sampler(tokens, self.SHAPE, 0, seed=1).batches(step)) for step in range(30)]
        again = list(Sampler(tokens, self.SHAPE, 0, seed=1).batches(29))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(fresh[29], again, strict=True))
        other = list(Sampler(tokens, self.SHAPE, 0, seed=2).batches(29))
        assert not all(torch.equal(a[0], b[0]) for a, b in zip(other, again, strict=True))

    def test_an_epoch_shows_each_window_once_and_the_next_in_another_order(self):
        tokens = _corpus(self.SHAPE.windows_per_step * 8 * 10 * 20 // 19 + 2).train
        sampler = Sampler(tokens, self.SHAPE, 0, seed=3)
        steps_per_epoch, rest = divmod(sampler.num_windows, self.SHAPE.windows_per_step)
        assert rest == 0

        def windows(epoch):
            steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
            return [tuple(row.tolist()) for step in steps for batch, _ in sampler.batches(step) for row in batch]

        expected = {tuple(tokens.read(8 * i, 8).tolist()) for i in range(sampler.num_windows)}
        assert len(windows(0)) == sampler.num_windows
        assert set(windows(0)) == set(windows(1)) == expected
        assert windows(0) != windows(1)

    def test_ranks_share_the_windows_of_the_same_step(self):
        tokens = _corpus(5000).train
        alone = Sampler(tokens, BatchShape(8, 2, 4), 0, seed=1)
        shared = [Sampler(tokens, BatchShape(8, 2, 2, data_parallel_size=2), rank, seed=1) for rank in (0, 1)]

        def rows(samplers):
            return sorted(tuple(row.tolist()) for s in samplers for batch, _ in s.batches(5) for row in batch)

        assert rows(shared) == rows([alone])
        assert not set(rows(shared[:1])) & set(rows(shared[1:]))


class TestCheck:
    def test_refuses_too_few_tokens(self):
        with pytest.raises(DataError, match="has 8 tokens, one window needs 9"):
            sampling.check(corpus.Range(corpus.ArrayTokens(np.zeros(8)), 0, 8), "validation", 8, 10)

    def test_refuses_tokens_outside_the_vocabulary(self):
        ids = np.zeros(100, np.uint16)
        ids[70] = 300
        with pytest.raises(DataError, match="token 300, the vocabulary has 257"):
            sampling.check(corpus.Range(corpus.ArrayTokens(ids), 0, 100), "training", 8, 257)
        sampling.check(corpus.Range(corpus.ArrayTokens(ids), 0, 100), "training", 8, 301)


class TestJsonTokenizer:
    @pytest.fixture
    def path(self, tmp_path):
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {"[UNK]": 0, "hello": 1, "world": 2}
        encoder = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        encoder.pre_tokenizer = pre_tokenizers.Whitespace()
        encoder.save(str(tmp_path / "tokenizer.json"))
        return tmp_path / "tokenizer.json"

    def test_encodes_and_adds_an_end_of_document(self, path):
        words = tokenizer.load(path)
        assert words.encode(b"world hello there", "a.txt").tolist() == [2, 1, 0]
        assert (words.eod, words.vocab_size) == (3, 4)

    def test_uses_the_end_of_document_it_has(self, path):
        content = json.loads(path.read_text())
        content["model"]["vocab"]["</s>"] = 3
        path.write_text(json.dumps(content))
        assert (tokenizer.load(path).eod, tokenizer.load(path).vocab_size) == (3, 4)

    def test_names_the_file_that_is_no_utf8(self, path):
        with pytest.raises(DataError, match=r"latin\.txt is no UTF-8"):
            tokenizer.load(path).encode(b"\xff\xfe", "latin.txt")

    def test_refuses_other_json(self, path):
        path.write_text("{}")
        with pytest.raises(ConfigError, match=r"tokenizer\.json is no JSON file of"):
            tokenizer.load(path)

    def test_refuses_a_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            tokenizer.load(tmp_path / "none.json")
