"""ms-swift's command line."""

from __future__ import annotations

PROGRAM, DISTRIBUTION = "ms-swift", "ms-swift"
PACKAGES = (
    "transformers==5.19.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4 accelerate addict aiohttp binpacking dacite einops "
    "fastapi uvicorn importlib-metadata json-repair modelscope nltk openai pandas rouge scipy sentencepiece simplejson "
    "sortedcontainers tensorboard tiktoken zstandard matplotlib attrdict"
)
ALONE = "ms-swift==4.6.0 transformers-stream-generator cpm-kernels oss2"
CASES = []
