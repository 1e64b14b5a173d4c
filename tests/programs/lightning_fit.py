"""Lightning's Trainer."""

import torch
from program import STEPS, case, model, on_gpu, token_rows

PROGRAM, DISTRIBUTION = "Lightning", "lightning"
PACKAGES, ALONE = "lightning==2.6.6", ""
CASES = []
CHEAP = True


@case(CASES, "fit", "`tigon.apply(model)` in the module, `tigon.optim.AdamW`")
@case(
    CASES, "fit, accumulation, clipping", "the same", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
)
@case(
    CASES, "fit, bf16-mixed, clipping", "`fused=False` for the optimizer too",
    {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    {"fused": False, "lr": 1e-3},  # AdamW begins with steps of lr in the direction of a sign, which rounding may turn
)  # fmt: skip
def fit(with_tigon, folder, options=(), changes=()):
    import lightning

    losses = []
    inner = model()
    adamw = torch.optim.AdamW
    if with_tigon:
        import tigon

        tigon.apply(inner)
        adamw = tigon.optim.AdamW

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = inner

        def training_step(self, inputs, index):
            loss = self.model(**inputs).loss
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return adamw(self.parameters(), **{"lr": 1e-2, **dict(changes)})

    rows = [{name: torch.tensor(row[name]) for name in row} for row in token_rows()]
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="gpu" if on_gpu() else "cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=folder, **dict(options),
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2))
    return losses
