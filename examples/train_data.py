"""Text for examples/train.py: files, a byte-level BPE trained on them, packed tokens.

Only numpy and the tokenizers library are needed. The tokenizer and the tokens are kept under a
hash of everything they depend on, so a second run starts at once.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import time
from pathlib import Path

MAX_BYTES = 20_000_000  # of text in all
MAX_FILE = 300_000  # a longer source file is a table, not prose or code
BPE_BYTES = 12_000_000  # of text the vocabulary is learned from: seconds, not minutes
END = "<|end|>"
FORMAT = "1"  # part of the hash: raise it when this file changes what it writes

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library() -> list[Path]:
    """The running Python's own source files, in a fixed order, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]):
            continue
        size = path.stat().st_size
        if 0 < size <= MAX_FILE and total + size <= MAX_BYTES:
            files.append(path)
            total += size
    if total < 100_000:
        raise SystemExit(f"no source files of Python under {root}: name text files with --data")
    return files


def named_files(names: list[str]) -> list[Path]:
    """The files given with --data; a folder stands for all files below it."""
    files: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise SystemExit(f"--data {name}: no such file or folder")
    return files


def read(files: list[Path]) -> list[str]:
    """Their text; bytes that are no UTF-8 are replaced."""
    texts = (path.read_bytes().decode("utf-8", errors="replace") for path in files)
    return [text for text in texts if text.strip()]


def train_tokenizer(texts: list[str], vocab: int):
    """A byte-level BPE of `vocab` entries (fewer if the text is too short to have so many)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    # Take every n-th file rather than the first ones, so that all of the text is represented.
    stride = max(1, -(-sum(map(len, texts)) // BPE_BYTES))
    tokenizer.train_from_iterator(texts[::stride], trainer)
    return tokenizer


def encode(tokenizer, texts: list[str], end: int | None):
    """All texts in one int32 array, each followed by the end token."""
    import numpy as np
    from tqdm import tqdm

    parts = []
    for start in tqdm(range(0, len(texts), 64), desc="tokens", unit="batch", leave=False, disable=None):
        for encoding in tokenizer.encode_batch(texts[start : start + 64], add_special_tokens=False):
            ids = encoding.ids + ([] if end is None else [end])
            parts.append(np.asarray(ids, dtype=np.int32))
    return np.concatenate(parts)


def prepare(names: list[str] | None, cache: Path, vocab: int, given: Path | None = None) -> dict:
    """Tokenize the text; returns paths and sizes.

    `given` is the tokenizer.json of an existing checkpoint; without it one of `vocab` entries is
    trained.
    """
    import numpy as np
    from tokenizers import Tokenizer

    files = named_files(names) if names else standard_library()
    texts = read(files)
    if not texts:
        raise SystemExit("the files of --data hold no text")
    key = hashlib.sha256(f"{FORMAT} {BPE_BYTES} {'given' if given else vocab}".encode())
    if given:
        key.update(given.read_bytes())
    for text in texts:
        key.update(hashlib.sha256(text.encode()).digest())
    folder = cache / key.hexdigest()[:16]
    info_file = folder / "info.json"
    if not info_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        tokenizer = Tokenizer.from_file(str(given)) if given else train_tokenizer(texts, vocab)
        tokenizer.save(str(folder / "tokenizer.json"))
        end = None if given else tokenizer.token_to_id(END)
        tokens = encode(tokenizer, texts, end)
        np.save(folder / "tokens.npy", tokens)
        info = {
            "files": len(files),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": int(tokens.size),
            "vocab": tokenizer.get_vocab_size(),
            "largest_token": int(tokens.max()),
            "end": end,
            "seconds": time.perf_counter() - start,
        }
        info_file.write_text(json.dumps(info))  # last: its presence says the folder is complete
    info = json.loads(info_file.read_text())
    paths = {"tokens_file": folder / "tokens.npy", "tokenizer_file": folder / "tokenizer.json"}
    return info | {name: str(path) for name, path in paths.items()}


def given_tokens(file: Path) -> dict:
    """Token ids that somebody has, int32 in a .npy file, in place of prepare's; `train_llama` writes such."""
    import numpy as np

    if not file.is_file():
        raise SystemExit(f"--tokens {file}: no such file")
    tokens = np.load(file, allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype != np.int32 or not tokens.size or tokens.min() < 0:
        raise SystemExit(f"--tokens {file}: must hold token ids, int32 [tokens]")
    largest = int(tokens.max())
    return {
        "files": 1,
        "bytes": file.stat().st_size,
        "tokens": int(tokens.size),
        "vocab": largest + 1,
        "largest_token": largest,
        "end": None,
        "tokens_file": str(file),
        "tokenizer_file": None,
    }


def mix(x):
    """splitmix64 of uint64 (Steele, Lea & Flood 2014); examples/cpp/train_llama.cpp has it too."""
    import numpy as np

    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def batches(tokens_file: str, batch: int, seq: int, steps: int, seed: int):
    """`steps` arrays of [batch, seq] token ids, the same ones for the same arguments."""
    import numpy as np

    tokens = np.load(tokens_file)
    if tokens.size < batch * seq:  # a short text is read again and again
        tokens = np.resize(tokens, batch * seq)
    rows = tokens[: tokens.size // seq * seq].reshape(-1, seq)
    queue, epoch = np.empty(0, dtype=np.int64), 0
    for _ in range(steps):
        while queue.size < batch:  # all rows once more, in the order of a hash of seed, epoch and row
            base = mix(mix(np.array([seed], np.uint64)) + np.uint64(epoch))
            order = np.argsort(mix(base + np.arange(len(rows), dtype=np.uint64)), kind="stable")
            queue, epoch = np.concatenate((queue, order)), epoch + 1
        yield rows[queue[:batch]].astype(np.int64)
        queue = queue[batch:]
