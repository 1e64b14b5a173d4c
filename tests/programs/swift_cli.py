"""ms-swift's command line."""

import json
import sys

from program import STEPS, case, logged, pairs, saved_model

PROGRAM, DISTRIBUTION = "ms-swift", "ms-swift"
PACKAGES = (
    "transformers[kernels]==5.19.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4 accelerate addict aiohttp binpacking dacite einops "
    "fastapi uvicorn importlib-metadata json-repair modelscope nltk openai pandas rouge scipy sentencepiece simplejson "
    "sortedcontainers tensorboard tiktoken zstandard matplotlib attrdict"
)
ALONE = "ms-swift==4.6.0 transformers-stream-generator cpm-kernels oss2"
CASES = []


@case(CASES, "SFT, full", "`tigon.compat.liger.install()`, `--use_liger_kernel true`", "sft", "full")
@case(CASES, "SFT, LoRA", "the same", "sft", "lora")
@case(CASES, "DPO, full", "the same", "rlhf", "full", head=False)
def train(with_tigon, folder, command, tuner):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    data = pairs()
    rows = []
    for prompt, chosen, rejected in zip(*data.values(), strict=True):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": chosen}]
        rows.append({"messages": messages} | ({"rejected_response": rejected} if command == "rlhf" else {}))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "model": saved_model(folder), "model_type": "llama", "template": "default", "use_hf": "true",
        "dataset": str(folder / "rows.jsonl"), "split_dataset_ratio": 0, "tuner_type": tuner, "lora_dropout": 0, "torch_dtype": "float32",
        "attn_impl": "eager", "max_length": 96, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
        "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none", "use_cpu": "true",
        "save_strategy": "no", "dataset_num_proc": 1, "dataloader_num_workers": 0, "output_dir": str(folder / "out"),
        "gradient_checkpointing": "false", "use_liger_kernel": str(with_tigon).lower(), "seed": 1,
    }  # fmt: skip
    if command == "rlhf":
        options["rlhf_type"] = "dpo"
    args = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    from swift.pipelines import rlhf_main, sft_main

    sys.argv = ["swift"]
    (rlhf_main if command == "rlhf" else sft_main)(args)
    log = next((folder / "out").rglob("logging.jsonl"))
    return logged([json.loads(line) for line in log.read_text().splitlines()])
