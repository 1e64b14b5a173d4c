"""Axolotl's command line."""

from __future__ import annotations

PROGRAM, DISTRIBUTION = "Axolotl", "axolotl"
PACKAGES = (
    "accelerate==1.13.0 datasets==4.8.4 peft==0.20.0 transformers==5.16.1 trl==1.9.0 kernels<0.17 addict fire colorama "
    "einops scipy evaluate==0.4.1 numba python-dotenv==1.0.1 fastcore schedulefree==1.4.1 posthog art requests "
    "sentencepiece mistral-common==1.11.5 nvidia-ml-py langdetect immutabledict trackio==0.19.0 tensorboard zstandard"
)
ALONE = "axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 optimum==1.16.2 bitsandbytes==0.50.2"
CASES = []
