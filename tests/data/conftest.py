"""What tests of data share."""

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def by_bytes():
    """A tokenizer with a token for each byte, which loses nothing."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(["<end>", *sorted(letters)])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of data sets; a function that gives the files that it has come to hold, and their times."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return lambda: {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
