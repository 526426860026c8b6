"""Tiny architectures with a tokenizer trained on the data at hand: models that need no download."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from course_lib.errors import ModelError
from course_lib.modeling import minilm

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


LLAMAS_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}

TINY: Mapping[str, Preset] = {
    "tiny-bert": Preset(
        "bert",
        {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 768},
        {
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        },
    ),
    "tiny-gpt2": Preset(
        "gpt2",
        {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 4},
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    ),
    "tiny-llama": Preset(
        "llama",
        {
            "num_hidden_layers": 4,
            "hidden_size": 192,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "tie_word_embeddings": True,
        },
        LLAMAS_TOKENS,
    ),
    "tiny-olmoe": Preset(
        "olmoe",
        {
            "num_hidden_layers": 4,
            "hidden_size": 192,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        LLAMAS_TOKENS,
    ),
    "tiny-mixtral": Preset(
        "mixtral",
        {
            "num_hidden_layers": 4,
            "hidden_size": 192,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        LLAMAS_TOKENS,
    ),
}

NAMES = (minilm.NAME, *TINY)
"""Every preset."""


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
        preset.model_type,
        **preset.sizes,
        vocab_size=len(tokenizer),
        max_position_embeddings=positions,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return config, tokenizer


def _train_byte_bpe(preset: Preset, texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE as GPT-2 and Llama 3 have it (Radford et al. 2019, section 2.2); every text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(preset.special_tokens.values()))
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    if preset.special_tokens is LLAMAS_TOKENS:
        bos = preset.special_tokens["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
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
    trained.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(
            vocab_size=VOCABULARY_SIZE,
            special_tokens=[*special, *(f"##{char}" for char in alphabet)],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
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
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    return tokenizer
