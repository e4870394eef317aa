"""What the demo model learns from: the sources of a standard library, and the tokenizer made of them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

END, PAD = "<|endoftext|>", "<|pad|>"
# Tables and tests teach no style; the rest is somebody else's code or data in the shape of code.
SKIPPED = {
    "__phello__", "distutils", "encodings", "idle_test", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip
HELD_OUT_EVERY = 50  # one file in fifty is never trained on: its loss is the one worth quoting
# A space belongs to the word before it, not, as in GPT-2, to the one after: so `def ` ends where a token ends, and the
# model goes on from it as it has learnt to. New lines and indents stand alone, for prompts that end in them.
PIECES = r"\n+|\w+ ?|[^\w\s]+ ?|[^\S\n]+"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Corpus:
    """Token ids of the training and the held-out files, each file ended by END."""

    digest: str
    files: int
    nbytes: int
    train: torch.Tensor  # int64 [tokens]
    held_out: torch.Tensor  # int64 [tokens]


def read_sources(root: Path) -> list[tuple[str, str]]:
    """`(path relative to root, text)` of each Python source under root, by path; what is not UTF-8 is left out."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found.append((relative.as_posix(), text))
    if not found:
        raise SystemExit(f"no Python source under {root}: give the directory of a standard library with --corpus")
    return found


def sources_digest(sources: list[tuple[str, str]]) -> str:
    """sha-256 over names and texts, in order."""
    digest = hashlib.sha256()
    for name, text in sources:
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `vocab` ids at most; every text has an encoding and decodes to itself."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts one after another, int64 [tokens], END after each."""
    rows = tokenizer([text + END for text in texts])["input_ids"] if texts else []
    return torch.tensor([id_ for row in rows for id_ in row], dtype=torch.int64)


def build_corpus(root: Path, vocab: int) -> tuple[PreTrainedTokenizerFast, Corpus]:
    sources = read_sources(root)
    held_out = [text for i, (_, text) in enumerate(sources) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
    train = [text for i, (_, text) in enumerate(sources) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    tokenizer = train_tokenizer(train, vocab)
    corpus = Corpus(
        digest=sources_digest(sources),
        files=len(sources),
        nbytes=sum(len(text.encode()) for _, text in sources),
        train=encode(tokenizer, train),
        held_out=encode(tokenizer, held_out),
    )
    return tokenizer, corpus
