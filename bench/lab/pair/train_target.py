"""Train the bundled target: a small Llama on public-domain narrative prose, from scratch, on a CPU.

    python train_target.py prepare books-train.txt.xz --work W     # tokenizer, token file
    python train_target.py train --work W --minutes 100            # again: resumes
    python train_target.py export --work W --out ../../../mlx_redrafter/pair/target
    python train_target.py evaluate books-train.txt.xz --model DIR # held-out bits per byte

Needs torch, numpy, sentencepiece, transformers and safetensors. The text and the held-out books are
those of `corpus.py`; the model and its optimiser those of `llama.py`. There is no step count:
progress runs from 0 to 1 over the time that is left. So a slow, stopped or resumed run still ends
on time with its learning rate decayed. Every resume may set other `--minutes`.
"""

import argparse
import json
import math
import os
import queue
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

import numpy as np
import sentencepiece as spm
import torch
import torch.multiprocessing as mp
from corpus import heldout_books, training_books
from llama import Llama, LlamaConfig, Muon
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer

CHECKPOINT = "checkpoint.pt"
TOKENIZER = "tokenizer.model"
CONVERTED = "tokenizer.json"
TOKENS = "tokens.npz"
LOG = "log.csv"
BOS, EOS = 1, 2

# The longest context; the data are shuffled in spans of this many tokens.
SPAN = LlamaConfig.max_position_embeddings
# A block is cut into contexts, shuffled again and trained on; the unit of resuming.
SPANS_PER_BLOCK = 64
BATCH_TOKENS = 8192
MICRO_TOKENS = 1024
CONTEXTS = ((0.10, 128), (0.60, 256), (math.inf, SPAN))  # (until this progress, context length)

WARMUP, COOLDOWN = 0.01, 0.5  # shares of the run: linear rise, linear fall to zero at the end
MUON_RATE, ADAM_RATE = 0.025, 6e-3

LOG_STEPS = 5
POLL_SECONDS = 20
CHECKPOINT_SECONDS = 300
# Each token is scored with at least half of this before it, as far as its book has it.
EVALUATION_CONTEXT = 512
EVALUATION_BATCH = 16


def prepare(corpus_file: Path, work: Path) -> None:
    """Train the tokenizer; store the books as one array of tokens, with lengths and weights."""
    work.mkdir(parents=True, exist_ok=True)
    books = training_books(corpus_file)
    train_tokenizer([text for _, text in books], work)
    tokenizer = spm.SentencePieceProcessor(model_file=str(work / TOKENIZER))
    tokens = [np.array([*tokenizer.encode(text), EOS], dtype=np.uint16) for _, text in books]
    weights, lengths = (
        np.array([weight for weight, _ in books]),
        np.array([len(array) for array in tokens]),
    )
    np.savez(work / TOKENS, weights=weights, lengths=lengths, tokens=np.concatenate(tokens))
    size = sum(len(text.encode()) for _, text in books)
    print(
        f"{len(books)} books, {size:,} bytes, {lengths.sum():,} tokens, "
        f"{size / lengths.sum():.3f} bytes per token"
    )
    print(f"{(weights * lengths).sum():,} tokens in one weighted pass")


def train_tokenizer(texts: list[str], work: Path) -> None:
    """Train a SentencePiece BPE as Llama has: byte fallback, single digits, blanks kept."""
    lines = work / "tokenizer-text.txt"
    lines.write_text(
        "\n".join(line for text in texts for line in text.split("\n") if line), encoding="utf-8"
    )
    spm.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(work / Path(TOKENIZER).stem),
        model_type="bpe",
        vocab_size=LlamaConfig.vocab_size,
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=1,
    )
    lines.unlink()


class Data:
    """Endless shuffled text: seed, block number and context length determine a block."""

    def __init__(self, work: Path, seed: int) -> None:
        with np.load(work / TOKENS) as arrays:
            self.tokens, self.lengths, self.weights = (
                arrays["tokens"],
                arrays["lengths"],
                arrays["weights"],
            )
        self.seed = seed
        self.blocks_per_pass = (
            int((self.weights * np.maximum(1, self.lengths // SPAN)).sum()) // SPANS_PER_BLOCK
        )
        self._pass, self._spans = -1, np.empty(0, dtype=np.int64)

    def _starts(self, number: int) -> np.ndarray:
        """Where the spans of a pass start: every book `weight` times, each at another phase."""
        rng = np.random.default_rng((self.seed, number))
        starts, begin = [], 0
        for weight, length in zip(self.weights, self.lengths, strict=True):
            for _ in range(weight):
                phase = int(rng.integers(0, min(SPAN, max(1, length - SPAN))))
                starts.append(np.arange(begin + phase, begin + length - SPAN, SPAN))
            begin += length
        return rng.permutation(np.concatenate(starts))

    def batches(self, block: int, context: int) -> Iterator[Tensor]:
        """The batches of one block, each (BATCH_TOKENS / context, context + 1)."""
        number, within = divmod(block, self.blocks_per_pass)
        if number != self._pass:
            self._pass, self._spans = number, self._starts(number)
        spans = self._spans[within * SPANS_PER_BLOCK : (within + 1) * SPANS_PER_BLOCK]
        starts = (spans[:, None] + np.arange(0, SPAN, context)).reshape(-1)
        starts = np.random.default_rng((self.seed, block, 1)).permutation(starts)
        rows = torch.from_numpy(
            self.tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
        )
        per_batch = BATCH_TOKENS // context
        for first in range(0, len(rows) - per_batch + 1, per_batch):
            yield rows[first : first + per_batch]


class Clock:
    """Progress from 0 to 1: each step takes its share of the time left, to 1 at the deadline."""

    def __init__(self, progress: float, deadline: float) -> None:
        self.progress, self.deadline = progress, deadline
        self._last, self._typical = time.time(), math.inf

    def tick(self) -> float:
        """Count one step; one that was stopped midway counts as three ordinary ones at most."""
        now = time.time()
        spent, self._last = now - self._last, now
        self._typical = min(spent, 1.1 * self._typical)  # the shortest of late
        spent = min(spent, 3 * self._typical)
        self.progress += (1 - self.progress) * spent / max(spent, self.deadline - now + spent)
        return self.progress


def rate_at(progress: float) -> float:
    """Compute the share of the peak learning rates: a trapezoid over the progress."""
    return max(0.0, min(1.0, (progress + 1e-4) / WARMUP, (1 - progress) / COOLDOWN))


def context_at(progress: float) -> int:
    return next(context for until, context in CONTEXTS if progress < until)


@dataclass
class Counts:
    """What a run has done so far."""

    block: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # inside steps, times when the process was stopped included
    progress: float = 0.0


class Workers:
    """Processes that compute gradients, one thread each, and take micro-batches from one queue.

    On a busy machine that beats threads, which wait for each other at every operator of the model.
    """

    def __init__(self, model: Llama, count: int) -> None:
        context = mp.get_context("spawn")
        self.tasks, self.losses = context.Queue(), context.Queue()
        self.parameters = list(model.share_memory().parameters())
        size = sum(p.numel() for p in self.parameters)
        self.gradients = [torch.zeros(size).share_memory_() for _ in range(count)]
        for gradient in self.gradients:
            context.Process(
                target=_work, args=(model, gradient, self.tasks, self.losses), daemon=True
            ).start()

    def backward(self, rows: Tensor) -> float:
        """Leave the gradient of the mean loss over a batch in the parameters; returns that loss."""
        parts = rows.split(max(1, MICRO_TOKENS // (rows.shape[1] - 1)))
        for part in parts:
            self.tasks.put(part.numpy())
        loss = sum(self._next_loss() for _ in parts) / len(parts)
        mean = torch.stack(self.gradients).sum(0) / len(parts)
        for parameter, gradient in _pairs(self.parameters, mean):
            parameter.grad = gradient
        for gradient in self.gradients:
            gradient.zero_()
        return loss

    def _next_loss(self) -> float:
        while True:
            try:
                return self.losses.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if len(mp.active_children()) < len(self.gradients):
                    raise SystemExit("error: a worker process died") from None


def _work(model: Llama, gradient: Tensor, tasks: mp.Queue, losses: mp.Queue) -> None:
    """Body of a worker: add up gradients in `gradient` until the parent is gone."""
    torch.set_num_threads(1)
    parent = os.getppid()
    loss_of = torch.compile(model.loss, dynamic=False)
    for parameter, view in _pairs(list(model.parameters()), gradient):
        parameter.grad = view
    while os.getppid() == parent:
        try:
            rows = torch.from_numpy(tasks.get(timeout=POLL_SECONDS))
        except queue.Empty:
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(rows)
        loss.backward()
        losses.put(loss.item())


def _pairs(parameters: list[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its part of a flat vector."""
    parts = flat.split([p.numel() for p in parameters])
    return ((p, part.view_as(p)) for p, part in zip(parameters, parts, strict=True))


class TrainingState:
    """Model, optimisers and counts: what a checkpoint holds."""

    def __init__(self, work: Path, shape: LlamaConfig, workers: int) -> None:
        self.work, self.shape, self.counts = work, shape, Counts()
        self.model = Llama(shape)
        self.muon = Muon(self.model.matrices())
        self.adam = torch.optim.AdamW(
            self.model.vectors(), ADAM_RATE, (0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.workers = Workers(self.model, workers)

    def step(self, rows: Tensor) -> float:
        """One optimiser step over a batch; returns the mean loss."""
        loss = self.workers.backward(rows)
        rate = rate_at(self.counts.progress)
        self.muon.step(MUON_RATE * rate)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * rate
        self.adam.step()
        return loss

    def save(self) -> None:
        """Replace the checkpoint in one move, so that a kill at any moment leaves a whole one."""
        content = {
            "shape": asdict(self.shape),
            "model": self.model.state_dict(),
            "muon": self.muon.momenta,
            "adam": self.adam.state_dict(),
            "state": asdict(self.counts),
        }
        torch.save(content, self.work / (CHECKPOINT + ".new"))
        os.replace(self.work / (CHECKPOINT + ".new"), self.work / CHECKPOINT)

    def restore(self) -> None:
        content = torch.load(self.work / CHECKPOINT, weights_only=True)
        self.model.load_state_dict(content["model"])
        self.muon.momenta = content["muon"]
        self.adam.load_state_dict(content["adam"])
        self.counts = Counts(**content["state"])


def train(work: Path, deadline: float, seed: int, workers: int) -> None:
    """Train until the deadline, from the checkpoint in `work` if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, run = Data(work, seed), TrainingState(work, LlamaConfig(), workers)
    if (work / CHECKPOINT).exists():
        run.restore()
        print(f"resumed at {run.counts}", flush=True)
    clock = Clock(run.counts.progress, deadline)
    saved = time.time()
    with (work / LOG).open("a", buffering=1) as log:
        while clock.progress < 1:
            train_block(run, data, clock, log)
            if time.time() - saved > CHECKPOINT_SECONDS or clock.progress >= 1:
                run.save()
                saved = time.time()


def train_block(run: TrainingState, data: Data, clock: Clock, log: TextIO) -> None:
    """Train on one block of data, or on as much of it as the deadline leaves time for."""
    counts, context = run.counts, context_at(clock.progress)
    for rows in data.batches(counts.block, context):
        started = time.time()
        loss = run.step(rows)
        counts.seconds += time.time() - started
        counts.tokens += BATCH_TOKENS
        counts.steps += 1
        counts.progress = clock.tick()
        if counts.steps % LOG_STEPS == 0:
            log.write(
                f"{counts.steps},{counts.tokens},{counts.seconds:.0f},"
                f"{counts.progress:.4f},{context},{loss:.4f}\n"
            )
        if clock.progress >= 1:
            break
    counts.block += 1


def export(work: Path, out: Path) -> None:
    """Write the checkpoint as a Hugging Face folder in float16."""
    content = torch.load(work / CHECKPOINT, weights_only=True)
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.float16).contiguous() for name, tensor in content["model"].items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **content["shape"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer_config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "add_eos_token": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": content["shape"]["max_position_embeddings"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    shutil.copyfile(work / TOKENIZER, out / TOKENIZER)
    # In this form mlx-lm knows the text of each token, and need not decode whole lines again.
    AutoTokenizer.from_pretrained(out).backend_tokenizer.save(str(out / CONVERTED), pretty=False)
    (out / TOKENIZER).unlink()
    print(f"{out}: {content['state']}", flush=True)


def load_exported(folder: Path) -> tuple[Llama, Tokenizer]:
    """An exported model in float32, and its tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(LlamaConfig(**{field.name: config[field.name] for field in fields(LlamaConfig)}))
    model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    return model.eval(), Tokenizer.from_file(str(folder / CONVERTED))


@torch.no_grad()
def book_nats(model: Llama, tokens: list[int]) -> float:
    """Total cross-entropy of a book's tokens but the first."""
    half = EVALUATION_CONTEXT // 2
    text, total = torch.tensor(tokens), 0.0
    padded = F.pad(text, (0, -(len(text) - 1) % half))
    windows = padded.unfold(0, EVALUATION_CONTEXT + 1, half)
    for first in range(0, len(windows), EVALUATION_BATCH):
        rows = windows[first : first + EVALUATION_BATCH]
        nats = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
        for number, row in enumerate(nats, first):
            known = len(text) - 1 - number * half
            total += row[half if number else 0 : known].sum().item()
    return total


def evaluate(corpus_file: Path, folder: Path, threads: int) -> None:
    """Print the held-out cross-entropy of an exported model, by book and over all."""
    torch.set_num_threads(threads)
    model, tokenizer = load_exported(folder)
    sums = np.zeros(3)
    print("nats/token  bits/byte  tokens   book")
    for title, paragraphs in heldout_books(corpus_file).items():
        text = "\n\n".join(paragraphs)
        tokens = tokenizer.encode(text).ids
        row = np.array([book_nats(model, tokens), len(tokens) - 1, len(text.encode())])
        sums += row
        print(_score(row), title, flush=True)
    print(_score(sums), "all")


def _score(row: np.ndarray) -> str:
    nats, tokens, size = row
    return f"{nats / tokens:10.4f} {nats / math.log(2) / size:10.4f} {tokens:8.0f}  "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="train the tokenizer and write the token file")
    command.add_argument("corpus", type=Path)
    command.add_argument("--work", type=Path, required=True)
    command = commands.add_parser("train", help="train, or go on training, until a deadline")
    command.add_argument("--work", type=Path, required=True)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes of one thread each"
    )
    command.add_argument("--minutes", type=float, required=True)
    command = commands.add_parser(
        "export", help="write the checkpoint as a float16 Hugging Face folder"
    )
    command.add_argument("--work", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("evaluate", help="score an exported folder on the held-out books")
    command.add_argument("corpus", type=Path)
    command.add_argument("--model", type=Path, required=True)
    command.add_argument("--threads", type=int, default=os.cpu_count())
    a = parser.parse_args()
    if a.command == "prepare":
        prepare(a.corpus, a.work)
    elif a.command == "train":
        train(a.work, time.time() + 60 * a.minutes, a.seed, a.workers)
    elif a.command == "export":
        export(a.work, a.out)
    else:
        evaluate(a.corpus, a.model, a.threads)


if __name__ == "__main__":
    main()
