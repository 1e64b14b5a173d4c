"""Medusa: heads that predict the tokens after the next one, trained in two stages, then used to decode.

    python examples/medusa.py --model out/checkpoint    on the checkpoint of `make train`
    python examples/medusa.py                           on a new small model, to see it run
    python examples/medusa.py --stock                   without Tigon alone

Stage 1 trains the heads on a frozen model, stage 2 both. Stock (logits of every head, PyTorch's
cross-entropy) and Tigon (`tigon.apply`, and all heads in one call of `tigon.nn.MedusaHeads`) begin from the
same weights and see the same batches. It ends with a table, a picture, and a greedy decode in which the
model checks what the heads guessed: as many tokens a pass as were right, and the same text as without heads.
"""

from __future__ import annotations

import copy
import json
import statistics
import time

import train_data
from sft_data import arguments, load_model, load_tokenizer
from train import pick_device

SCALE, DECAY = 0.2, 0.8  # of the heads' losses in stage 2; of each head's against the one before


def stock_loss(model, heads, hidden, labels, joint):
    """The losses of all heads from their logits, and their sum with coefficients."""
    import torch.nn.functional as F

    logits = [*([model.lm_head(hidden)] if joint else []), *heads(hidden)]
    first, scale = (0, SCALE) if joint else (1, 1.0)
    losses = [
        F.cross_entropy(z[:, : labels.shape[1] - k].flatten(0, 1).float(), labels[:, k:].flatten())
        for k, z in enumerate(logits, start=first + 1)
    ]
    return sum(loss * (scale * DECAY**i if i else 1.0) for i, loss in enumerate(losses, start=first)), losses


def tigon_loss(model, heads, hidden, labels, joint):
    """The same in one call, without logits."""
    if joint:
        out = heads(hidden, labels, head=model.lm_head, scale=SCALE, decay=DECAY)
    else:
        out = heads(hidden, labels, decay=DECAY)
    return out.loss, out.losses


def evaluate(model, heads, rows, joint):
    """The loss of a stage, by Tigon."""
    import torch

    with torch.no_grad():
        hidden = model.model(input_ids=rows).last_hidden_state
        return float(tigon_loss(model, heads, hidden, rows, joint)[0])


def train(model, heads, rows, held, args, name, joint):
    """One stage; curves and what they cost. `held`: token ids that are not trained on."""
    import torch
    from tqdm import tqdm
    from train_worker import PeakMemory

    device = held.device
    before = evaluate(model, heads, held, joint)
    model.requires_grad_(joint)
    trained = [p for module in (model, heads) for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr / (10 if joint else 1), fused=True)
    loss_of = stock_loss if name == "stock" else tigon_loss
    curve, last, seconds, peak = [], [], [], PeakMemory(str(device))
    bar = tqdm(rows, desc=f"{name}, stage {1 + joint}", unit="step", leave=False, disable=None)
    for step, batch in enumerate(bar):
        ids = torch.as_tensor(batch, dtype=torch.int64, device=device)
        begin = time.perf_counter()
        with torch.set_grad_enabled(joint):
            hidden = model.model(input_ids=ids).last_hidden_state
        loss, losses = loss_of(model, heads, hidden, ids, joint)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(loss.detach()))
        last = [one.item() for one in losses]
        seconds.append(time.perf_counter() - begin)
        bar.set_postfix_str(f"loss {curve[-1]:.4f}", refresh=False)
        del loss, losses, hidden
        if step == 0:
            peak.start()  # the first step made the optimizer's state
    timed = statistics.median(seconds[1:] or seconds)
    return {
        "losses": curve,
        "heads": last,
        "before": before,
        "peak_bytes": peak.above(),
        "tokens_per_s": ids.numel() / timed,
        "after": evaluate(model, heads, held, joint),
    }


def decode(model, heads, ids, tokens):
    """Greedy text of the model, with the number of its passes: each checks what the heads guessed before."""
    import torch

    passes, made, guesses = 0, [], []
    while len(made) < tokens:
        with torch.no_grad():
            known = torch.cat((ids, ids.new_tensor([[*made, *guesses]])), -1)
            hidden = model.model(input_ids=known).last_hidden_state[:, ids.shape[1] + len(made) - 1 :]
            said = model.lm_head(hidden)[0].argmax(-1).tolist()  # after what is known, after each guess
            right = 0
            while right < len(guesses) and guesses[right] == said[right]:
                right += 1
            made += said[: right + 1]
            # Heads look past the token that was just said: the first of them guesses the one after it.
            guesses = [int(one(hidden[:, right]).argmax()) for one in heads]
        passes += 1
    return made[:tokens], len(made) / passes


def report(args, results, accepted):
    """Table, JSON and picture."""
    folder = args.out / "medusa"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "medusa.json").write_text(json.dumps({"stages": results, "accepted": accepted}))
    print(f"{'':<16}{'held-out loss':>20}{'last losses of heads':>30}{'tokens/s':>10}{'peak GB':>9}")
    for stage, runs in results.items():
        for name, run in runs.items():
            curve = f"{run['before']:.4f} -> {run['after']:.4f}"
            of_heads = " ".join(f"{loss:.3f}" for loss in run["heads"])
            cost = f"{run['tokens_per_s']:>10,.0f}{run['peak_bytes'] / 1e9:>9.2f}"
            print(f"{stage + ', ' + name:<16}{curve:>20}{of_heads:>30}{cost}")
    try:
        from train_plot import draw
    except ImportError:
        return
    for number, (stage, runs) in enumerate(results.items(), start=1):
        try:
            draw({"runs": runs, "title": f"Medusa, {stage}"}, folder / f"stage{number}.png")
        except ImportError:  # no matplotlib
            return


def main(words: list[str] | None = None) -> int:
    """Data, model, both stages of both providers, decoding."""
    parser = arguments(__doc__, batch=2, seq=96, steps=10, lr=3e-4)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--layers", type=int, default=1, help="residual blocks of a head")
    parser.add_argument("--decode", type=int, default=48, help="tokens")
    args = parser.parse_args(words)
    import torch

    import tigon

    tokenizer, data = load_tokenizer(args)
    base = load_model(args, tokenizer)
    device = pick_device(args.device)
    rows = list(train_data.batches(data["tokens_file"], args.batch, args.seq, 2 * args.steps + 1, 0))
    held = torch.as_tensor(rows.pop(), dtype=torch.int64, device=device)
    vocab, size = base.lm_head.weight.shape
    results = {"stage 1": {}, "stage 2": {}}
    for name in ("stock",) if args.stock else ("stock", "tigon"):
        model = copy.deepcopy(base).to(device)
        heads = tigon.nn.MedusaHeads(size, vocab, args.heads, args.layers).copy_head(base.lm_head.weight)
        heads = heads.to(device, model.dtype)
        if name == "tigon":
            print(tigon.apply(model))
        for stage, joint in (("stage 1", False), ("stage 2", True)):
            part = rows[args.steps :] if joint else rows[: args.steps]
            results[stage][name] = train(model, heads, part, held, args, name, joint)
    model.eval()
    prompt = torch.as_tensor(rows[0][:1, : args.seq // 2], dtype=torch.int64, device=device)
    text, accepted = decode(model, heads, prompt, args.decode)
    plain, _ = decode(model, [], prompt, args.decode)
    report(args, results, accepted)
    same = "the" if text == plain else "NOT the"
    print(f"decoding: {accepted:.2f} tokens a pass on average, {same} text that the model writes by itself")
    print(repr(tokenizer.decode(text)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
