"""What the programs of this folder share: their register of cases, a tiny model, and text to train it on."""

import dataclasses
import functools
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/hf"))
STEPS = 3


@dataclasses.dataclass
class Case:
    """One run of a program, stock and with Tigon."""

    name: str
    switch: str  # what turns Tigon on, as a user writes it
    function: Callable  # (with_tigon: bool, folder, *arguments) -> losses
    arguments: tuple = ()
    processes: int = 1
    head: bool = True  # whether the loss comes from the fused head
    lora: bool = True  # whether its adapters are fused, where it has some
    gpu: str = ""  # why it cannot run on a machine without a GPU


def case(cases: list, name: str, switch: str, *arguments, **options):
    """Register a function as a case; of several cases of one function the upper ones come first."""

    def register(function):
        at = next((i for i, c in enumerate(cases) if c.function is function), len(cases))
        cases.insert(at, Case(name, switch, function, arguments, **options))
        return function

    return register


@functools.cache
def paragraphs() -> list[str]:
    """The repository's own text: paragraphs of its documentation."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[a-l]*.md"))]
    parts = [part.strip() for file in files for part in file.read_text("utf-8").split("\n\n")]
    return [" ".join(part.split())[:300] for part in parts if part[:1].isalpha() and len(part) > 120][:64]


@functools.cache
def tokenizer():
    """A byte-level BPE of the paragraphs, with a chat template."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(paragraphs(), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], bos_token=special[1], eos_token=special[2],
        model_max_length=128,
    )  # fmt: skip
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return made


def model(family="llama", **changes):
    """A tiny random model with the tokenizer's vocabulary, the same in every process."""
    import tiny

    options = {"vocab_size": len(tokenizer()), "max_position_embeddings": 256, **changes}
    return tiny.make(family, **options)


def saved_model(folder: Path, family="llama", **changes) -> str:
    """A folder with the tiny model and its tokenizer."""
    place = folder / "model"
    model(family, **changes).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return str(place)


def token_rows(count=16, length=32) -> list[dict]:
    """Rows of token ids and labels, the first quarter of each masked."""
    ids = tokenizer()(" ".join(paragraphs()))["input_ids"]
    rows = [ids[i * length : (i + 1) * length] for i in range(count)]
    masked = [-100] * (length // 4)
    return [
        {"input_ids": row, "labels": masked + row[length // 4 :], "attention_mask": [1] * length}
        for row in rows
    ]


def batches(processes=1):
    """`STEPS` batches of two rows as tensors, each process its own."""
    import torch

    rank = int(os.environ.get("RANK", 0))
    rows = token_rows(2 * STEPS * processes)
    for i in range(STEPS):
        at = 2 * (i * processes + rank)
        yield {name: torch.tensor([row[name] for row in rows[at : at + 2]]) for name in rows[0]}


def pairs() -> dict[str, list[str]]:
    """Prompts and two answers each, of the paragraphs' words."""
    words = [text.split() for text in paragraphs()[:32]]
    return {
        "prompt": [" ".join(w[:6]) for w in words],
        "chosen": [" " + " ".join(w[6:14]) for w in words],
        "rejected": [" " + " ".join(w[:5:-1][:8]) for w in words],
    }


def trainer_options(folder: Path, **changes) -> dict:
    """Arguments of transformers' Trainer and of those made from it."""
    return {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 2, "max_steps": STEPS,
        "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none", "seed": 1, "use_cpu": not on_gpu(),
        "save_strategy": "no", "disable_tqdm": True, **changes,
    }  # fmt: skip


def stand_in(*names: str) -> None:
    """Empty modules for packages that a program imports and does not use here, and that need CUDA's libraries."""

    def anything(attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)

    for name in names:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__, module.__getattr__ = [], anything
        sys.modules.setdefault(name, module)


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def logged(history: list[dict]) -> list[float]:
    """Losses and gradient norms of a Trainer's log."""
    return [float(entry[n]) for entry in history for n in ("loss", "grad_norm") if n in entry]


def state_losses(folder: Path) -> list[float]:
    """The same from the trainer_state.json that a program has written somewhere below a folder."""
    found = max(folder.rglob("trainer_state.json"), key=lambda path: (-len(path.parts), str(path)))
    return logged(json.loads(found.read_text())["log_history"])


def loop(model, optimizer, backward=None, processes=1) -> list[float]:
    """Losses and gradient norms of a few steps; `backward` of a loss, where a program has its own."""
    import torch

    said = []
    for inputs in batches(processes):
        loss = model(**inputs).loss
        (backward or torch.Tensor.backward)(loss)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        said += [float(loss.detach()), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]
        optimizer.step()
        optimizer.zero_grad()
    return said
