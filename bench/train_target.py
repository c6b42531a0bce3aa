"""Train the embedded target: a byte-level Qwen3 model of about two million parameters, on Python's standard library.

    python -m bench.train_target --out engine/embedded --minutes 4

writes config.json, model.safetensors (bf16), greedy.txt (200 greedy bytes after a held-out prompt) and training.json
(how it was made and its bits per byte on held-out files). The text of a document is the bos token and then its bytes;
training windows start anywhere in the chain of all documents, so a chunk from inside a file is nothing new to it.
"""

import dataclasses
import json
import math
import platform
import time
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.bytes_vocab import BOS_TOKEN_ID, VOCAB_SIZE, encode_bytes, encode_document
from engine.corpus import corpus_files, read_documents, stdlib_root
from engine.rope import RopeConfig
from engine.target import MLP, Attention, Target, greedy_generate, load_target
from engine.target_config import TargetConfig

GREEDY_BYTES = 200
PROMPT_BYTES = 256
# Past a file's opening comments and imports.
SKIPPED_BYTES = 1024
# Steps that are not timed (compilation, first kernels), then steps that are, before the length of the run is fixed.
UNTIMED_STEPS, TIMED_STEPS = 20, 40
# One training file in so many chooses which weights are kept, so that the held-out files measure and nothing else.
VALIDATION_STRIDE = 33
CHECKS = 20
# Until the length of a timed run is known its warm-up is that of a run of so many steps.
ASSUMED_STEPS = 5000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTargetConfig:
    """Settings of one run; every one of them is written into training.json."""

    minutes: float = 4.0
    steps: int = 0
    windows: int = 128
    context: int = 1024
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    warmup_fraction: float = 0.03
    clip: float = 1.0
    hidden_size: int = 192
    layers: int = 6
    seed: int = 0


def target_config(settings: TrainTargetConfig) -> TargetConfig:
    """Sizes of the target; the default has 1,970,496 parameters: 3.95 MB in bf16."""
    return TargetConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        rope=RopeConfig(theta=10000.0),
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=BOS_TOKEN_ID,
    )


def initialise(target: Target, seed: int) -> None:
    """Normal weights, 1/sqrt(inputs) wide, less for what is added to the residual stream: it is a sum of many."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in target.named_parameters():
        if parameter.dim() == 1:
            continue
        std = 0.04 if "embed" in name else parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * target.config.num_hidden_layers)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def add_dropout(target: Target, rate: float) -> None:
    """Dropout on what each layer adds to the residual stream, while training: the corpus is seen a hundred times."""

    def drop(module: nn.Module, _: object, output: Tensor) -> Tensor:
        return F.dropout(output, rate, module.training)

    for module in target.modules():
        if isinstance(module, Attention | MLP):
            module.register_forward_hook(drop)


def chain_of(documents: list[bytes]) -> Tensor:
    """All documents one after the other, each opened by bos: int64[n]."""
    return torch.cat([encode_document(text) for text in documents]).long()


@torch.inference_mode()
def bits_per_byte(target: Target, documents: list[bytes], context: int, rows: int = 32) -> float:
    """Mean cost of a byte in bits; each document is cut into windows of `context` inputs that do not overlap.

    Every byte is predicted exactly once: a window's first input is the last token of the window before it.
    """
    windows: list[Tensor] = []
    for text in documents:
        tokens = encode_document(text)
        windows += [tokens[start : start + context + 1] for start in range(0, len(tokens) - 1, context)]
    windows.sort(key=len)
    nats, count = 0.0, 0
    for start in range(0, len(windows), rows):
        batch = windows[start : start + rows]
        padded = torch.full((len(batch), len(batch[-1])), -100, dtype=torch.long)
        for row, tokens in zip(padded, batch, strict=True):
            row[: len(tokens)] = tokens
        padded = padded.to(target.device)
        logits = target(padded[:, :-1].clamp(min=0)).logits.float()
        nats += float(
            F.cross_entropy(logits.flatten(0, 1), padded[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        )
        count += int((padded[:, 1:] >= 0).sum())
    return nats / count / math.log(2)


def learning_rate(settings: TrainTargetConfig, step: int, steps: int) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = max(1, round(settings.warmup_fraction * steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def save_target(target: Target, directory: Path) -> None:
    """Write config.json and model.safetensors in bf16, as Hugging Face lays them out."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(target.config.to_json(), indent=1) + "\n", encoding="utf-8")
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in target.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def train(settings: TrainTargetConfig, documents: list[bytes], out: Path, device: torch.device) -> dict[str, object]:
    """Train on random windows of the documents; the best weights are left in `out`, the story is returned."""
    started = time.monotonic()
    first_kept = VALIDATION_STRIDE // 2
    validation = documents[first_kept::VALIDATION_STRIDE] or documents[:1]
    chain = chain_of([text for i, text in enumerate(documents) if i % VALIDATION_STRIDE != first_kept])
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    target = Target(target_config(settings))
    initialise(target, settings.seed)
    add_dropout(target, settings.dropout)
    target.to(device)
    chain = chain.to(device)
    matrices = [p for p in target.parameters() if p.dim() > 1]
    vectors = [p for p in target.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=on_gpu)
    generator = torch.Generator(device).manual_seed(settings.seed)
    offsets = torch.arange(settings.context + 1, device=device)

    def loss_of(windows: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = target(windows[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    compiled = torch.compile(loss_of) if on_gpu else loss_of
    steps = settings.steps
    first_timed = 0.0
    curve: list[tuple[int, float, float]] = []
    best = math.inf
    running = torch.zeros((), device=device)
    since = 0
    step = 0
    while not steps or step < steps:
        if not settings.steps and step == UNTIMED_STEPS:
            running.item()
            first_timed = time.monotonic()
        if not settings.steps and step == UNTIMED_STEPS + TIMED_STEPS:
            running.item()
            now = time.monotonic()
            left = settings.minutes * 60 - (now - started)
            steps = step + max(1, int(left / ((now - first_timed) / TIMED_STEPS)))
            click.echo(f"{steps} steps, {(now - first_timed) / TIMED_STEPS * 1e3:.1f} ms each")
        rate = learning_rate(settings, step, steps or ASSUMED_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = torch.randint(len(chain) - settings.context, (settings.windows, 1), device=device, generator=generator)
        loss = compiled(chain[first + offsets])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(target.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        since += 1
        step += 1
        if step % max(1, (steps or ASSUMED_STEPS) // CHECKS) == 0 or step == steps:
            mean = running.item() / since / math.log(2)
            running.zero_()
            since = 0
            target.eval()
            found = bits_per_byte(target, validation, settings.context)
            target.train()
            curve.append((step, round(mean, 4), round(found, 4)))
            seconds = time.monotonic() - started
            click.echo(f"step {step}: {mean:.4f} bits per byte, validation {found:.4f}, lr {rate:.2e}, {seconds:.0f} s")
            # A run that is killed leaves its best weights so far.
            if found < best:
                best = found
                save_target(target, out)
            if not settings.steps and time.monotonic() - started > 1.25 * settings.minutes * 60:
                click.echo("stopped: a quarter over the time that was asked for")
                break
    tokens = step * settings.windows * settings.context
    return {
        "settings": dataclasses.asdict(settings),
        "steps": step,
        "tokens": tokens,
        "epochs": round(tokens / len(chain), 2),
        "train_s": round(time.monotonic() - started, 1),
        "validation_bits_per_byte": round(best, 4),
        "curve": [{"step": at, "training": mean, "validation": found} for at, mean, found in curve],
    }


def greedy_sample(target: Target, files: list[Path]) -> tuple[bytes, dict[str, object]]:
    """Greedy bytes after the first held-out prompt that the model continues for 200 without a loop or a document's end.

    A prompt is the text before a held-out file's first function after SKIPPED_BYTES, "def " included.
    Raises ValueError when there is no such continuation.
    """
    for path in files:
        text = path.read_bytes()
        end = text.find(b"\ndef ", SKIPPED_BYTES) + len(b"\ndef ")
        prompt = text[end - PROMPT_BYTES : end]
        if end < SKIPPED_BYTES or not prompt.isascii():
            continue
        tokens = greedy_generate(target, encode_bytes(prompt).long(), GREEDY_BYTES)
        if len(tokens) == GREEDY_BYTES and max(tokens) < 256 and not is_loop(tokens):
            return bytes(tokens), {"file": path.relative_to(stdlib_root()).as_posix(), "text": prompt.decode()}
    raise ValueError(
        "greedy sample: expected a held-out prompt with 200 bytes of continuation, found none. Train longer."
    )


def is_loop(tokens: list[int]) -> bool:
    """Whether more than a third of all runs of eight tokens occurred before, as greedy text of small models does."""
    runs = [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)]
    return len(set(runs)) < len(runs) * 2 / 3


def write_record(record: dict[str, object], out: Path) -> None:
    """Write training.json."""
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _describe(device: torch.device) -> dict[str, object]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"torch": torch.__version__, "python": platform.python_version(), "gpu": gpu}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--minutes", type=float, default=TrainTargetConfig.minutes, show_default=True, help="Time to train.")
@click.option(
    "--steps", type=int, default=0, show_default=True, help="Steps to train instead of --minutes; 0: by time."
)
@click.option("--windows", type=int, default=TrainTargetConfig.windows, show_default=True, help="Windows a step.")
@click.option("--context", type=int, default=TrainTargetConfig.context, show_default=True, help="Tokens of a window.")
@click.option(
    "--learning-rate", type=float, default=TrainTargetConfig.learning_rate, show_default=True, help="Peak rate."
)
@click.option("--dropout", type=float, default=TrainTargetConfig.dropout, show_default=True, help="Dropout.")
@click.option("--layers", type=int, default=TrainTargetConfig.layers, show_default=True, help="Layers of the target.")
@click.option("--hidden-size", type=int, default=TrainTargetConfig.hidden_size, show_default=True, help="Its width.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and windows.")
@click.option("--max-files", type=int, default=0, show_default=True, help="Files of each split to read; 0: all.")
def main(out: Path, max_files: int, **values: float) -> None:
    """Train the embedded target on the standard library of this interpreter."""
    settings = TrainTargetConfig(**values)  # type: ignore[arg-type]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_files, held_files = (corpus_files(split)[: max_files or None] for split in ("train", "heldout"))
    documents, held = read_documents(train_files), read_documents(held_files)
    sizes = {
        "train_files": len(documents),
        "train_bytes": sum(map(len, documents)),
        "heldout_files": len(held),
        "heldout_bytes": sum(map(len, held)),
    }
    click.echo(f"{sizes} on {device}")
    run = train(settings, documents, out, device)
    # Measured on what a user loads: the bf16 file, computed in fp32.
    torch.set_float32_matmul_precision("highest")
    target = load_target(out, device, torch.float32)
    length = f"--steps {settings.steps}" if settings.steps else f"--minutes {settings.minutes:g}"
    record: dict[str, object] = {
        "command": f"python -m bench.train_target --out engine/embedded {length} --seed {settings.seed}",
        **run,
        "corpus": sizes,
        "parameters": sum(p.numel() for p in target.parameters()),
        "file_bytes": (out / "model.safetensors").stat().st_size,
        "heldout_bits_per_byte": round(bits_per_byte(target, held, settings.context), 4),
        **_describe(device),
    }
    write_record(record, out)
    text, prompt = greedy_sample(load_target(out), held_files)
    (out / "greedy.txt").write_bytes(text)
    write_record({**record, "greedy_prompt": prompt}, out)
    click.echo(text.decode("utf-8", errors="replace"))
    click.echo(json.dumps({k: v for k, v in record.items() if k != "curve"}))


if __name__ == "__main__":
    main()
