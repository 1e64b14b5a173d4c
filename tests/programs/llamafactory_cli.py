"""LLaMA-Factory's command line."""

from __future__ import annotations

PROGRAM, DISTRIBUTION = "LLaMA-Factory", "llamafactory"
PACKAGES = (
    "accelerate==1.11.0 datasets==4.0.0 peft==0.18.1 transformers==5.6.0 trl==0.24.0 av einops fire omegaconf pandas "
    "protobuf scipy sentencepiece tiktoken tyro==0.8.14 fastapi uvicorn sse-starlette matplotlib modelscope hf-transfer"
)
ALONE = "llamafactory==0.9.5"
CASES = []
